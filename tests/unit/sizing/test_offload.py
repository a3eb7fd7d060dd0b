"""A step whose weights, gradients and states are in RAM: what is where, and what is copied."""

import pytest

from benchmarks.small_models import WIDE, small_config
from benchmarks.steps import step_of
from sft_play.config.schema import LoraSettings
from sft_play.engines.registry import engine_of
from sft_play.sizing.estimate.budget import GIB, device_budget, host_budget
from sft_play.sizing.estimate.memory import SizedStep, estimate
from sft_play.sizing.step import PaddedRows, StepSpec
from sft_play.sizing.trace.files import load_trace, save_trace
from sft_play.sizing.trace.trace import trace_step
from sft_play.work import IN_RAM, TRANSFER

LLAMA = small_config("llama", WIDE | {"layers": 4, "vocabulary": 300})
# the inputs of the first layer need no gradients: FSDP2 exchanges its own when the pass is over
ON_MACHINES = dict(mode="lora", shards=2, replicated=True, accumulates=False)
HELD = ("weights", "adapters", "gradients", "optimizer")


def spec(**changes) -> StepSpec:
    """One process on a GPU, full fine-tuning in fp32, gradients accumulated."""
    settings = dict(
        mode="full", lora=LoraSettings(r=4), batch=PaddedRows(2, 128), device="cuda", offload=True
    )
    return step_of(**settings | changes)


@pytest.fixture(scope="module")
def trace():
    return trace_step(LLAMA, spec())


def test_one_process_has_a_layer_on_the_gpu_and_all_the_rest_in_ram(trace):
    """In fp32: 4 bytes of weights, 4 of gradients and 8 of moments for each element."""
    elements = trace.work.trained_elements
    device, ram = trace.step.on_device().peaks(), trace.step.in_ram().peaks()["optimizer"].terms
    assert [ram[name] / elements for name in HELD] == pytest.approx([4, 0, 4, 8], rel=0.001)
    for phase, peak in device.items():
        held = sum(peak.terms[name] for name in HELD)
        assert held < (4 * elements if phase == "load" else 1000), phase
    # a layer's weights, and those that are fetched ahead
    assert 0 < device["backward"].terms["engine"] < 4 * elements


def test_weights_are_copied_twice_and_gradients_once_and_summed_up_in_ram(trace):
    """The last unit stays on the GPU for the backward pass. A copy is read and written."""
    everything = 4 * trace.work.trained_elements
    tail = 4 * (LLAMA.vocab_size + 1) * LLAMA.hidden_size
    copied, summed = engine_of("fsdp2").moved_by_offload(trace.work, 3)
    assert sum(trace.work.exchanged(TRANSFER).elements()) == 2 * (3 * everything - tail)
    assert copied == 3 * 2 * (3 * everything - tail)
    assert summed == 3 * sum(trace.work.exchanged(IN_RAM).elements()) > 0


def test_zero3_adds_gradients_up_on_the_gpu(trace):
    """Those of two earlier micro-batches are copied there and back, and all of them once more in the end."""
    gradients = 4 * trace.work.trained_elements
    ours, theirs = (engine_of(name).moved_by_offload(trace.work, 3) for name in ("deepspeed_z3", "fsdp2"))
    assert ours == (theirs[0] + 2 * 5 * gradients, 4 * gradients)


def test_a_machine_needs_what_its_processes_hold_pinned_blocks_as_they_are_allocated(trace):
    host = host_budget(200 * GIB, 2)
    memory = estimate([SizedStep(trace.step)], device_budget("cuda", 24 * GIB, host=host))
    ram = trace.step.in_ram().peaks()["backward"].terms
    pinned, exact = memory.host.terms["weights"], ram["weights"]
    assert exact < pinned < 2 * exact and memory.host.terms["optimizer"] == ram["optimizer"]
    each = host.own_bytes + sum(memory.host.terms.values())
    assert memory.host.needed_bytes == 2 * each + memory.host.saved_bytes
    assert (
        memory.fits
        and not estimate(
            [SizedStep(trace.step)], device_budget("cuda", 24 * GIB, host=host_budget(6 * GIB, 2))
        ).fits
    )


def test_a_trace_on_disk_knows_what_is_in_ram(trace, tmp_path):
    save_trace(tmp_path / "trace", trace)
    assert load_trace(tmp_path / "trace").in_ram == trace.in_ram != ()


def test_gradients_that_machines_sum_wait_for_the_end_of_the_backward_pass_in_each_layer():
    """Else all layers would have to be traced: 80 instead of three."""
    few, full = (trace_step(LLAMA, spec(**ON_MACHINES), all_layers=every) for every in (False, True))
    assert few.stand_ins == (0, 1, 1, 2) and not full.stand_ins
    for place in ("on_device", "in_ram"):
        ours, theirs = (getattr(one.step, place)().peaks() for one in (few, full))
        assert ours["backward"] == theirs["backward"]


@pytest.mark.thorough
def test_on_a_cpu_all_is_in_ram_already():
    offloaded, plain = (
        trace_step(LLAMA, spec(device="cpu", shards=2, offload=away)) for away in (True, False)
    )
    assert not offloaded.in_ram
    assert offloaded.step.peaks() == plain.step.peaks()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        dict(dtype="bfloat16", mixed_precision="bf16", mode="lora"),
        dict(dtype="bfloat16", mixed_precision="bf16", mode="qlora", shards=2, activations="recompute"),
        dict(mixed_precision="bf16", shards=3, accumulates=False),
    ],
)
def test_few_layers_represent_all_of_an_offloaded_model(changes):
    few, full = (trace_step(LLAMA, spec(**changes), all_layers=every) for every in (False, True))
    assert few.stand_ins and not full.stand_ins
    for place in ("on_device", "in_ram"):
        ours, theirs = (getattr(one.step, place)().peaks() for one in (few, full))
        assert ours.pop("optimizer").bytes == pytest.approx(theirs.pop("optimizer").bytes, abs=2000)
        assert ours == theirs
