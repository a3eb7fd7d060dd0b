"""Layers that are recomputed from inputs in RAM: what is where, and what is copied."""

from dataclasses import replace

import pytest

from benchmarks.small_models import WIDE, small_config
from benchmarks.steps import step_of, step_with
from sft_play.config.schema import LoraSettings
from sft_play.sizing.estimate.budget import GIB, device_budget, host_budget
from sft_play.sizing.estimate.estimator import Traces
from sft_play.sizing.estimate.memory import SizedStep, estimate
from sft_play.sizing.step import JoinedRows, PaddedRows
from sft_play.sizing.trace.trace import trace_step
from sft_play.work import TRANSFER

LLAMA = small_config("llama", WIDE | {"layers": 6, "vocabulary": 300})
TOKENS = 2 * 512
INPUT = TOKENS * 256 * 2  # bytes of the hidden states in bf16
SPEC = step_of(
    mode="full", lora=LoraSettings(r=4), device="cuda", dtype="bfloat16", mixed_precision="bf16",
    batch=PaddedRows(2, 512), activations="offload",
)  # fmt: skip


def test_the_inputs_of_all_layers_are_in_ram_and_one_of_them_on_the_gpu():
    offloaded, here = (
        trace_step(LLAMA, step_with(SPEC, activations=way)) for way in ("offload", "recompute")
    )
    ram = offloaded.step.in_ram().peaks()
    assert ram["forward"].terms["activations"] == ram["forward"].bytes == 6 * INPUT
    assert ram["optimizer"].bytes == 0
    # when the loss is computed, all six are away
    ours, theirs = (trace.step.on_device().peaks()["forward"].terms for trace in (offloaded, here))
    assert theirs["activations"] - ours["activations"] == 6 * INPUT
    backward = [trace.step.on_device().peaks()["backward"].bytes for trace in (offloaded, here)]
    assert backward[1] - backward[0] >= 5 * INPUT


def test_each_input_is_copied_there_and_back_once():
    work = trace_step(LLAMA, SPEC).work
    assert work.exchanged(TRANSFER) == {2 * INPUT: 12}  # read and written


@pytest.mark.thorough
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(dict(mode="qlora", batch=JoinedRows(512), longest=256), marks=pytest.mark.slow),
        pytest.param(dict(mode="lora", shards=2), marks=pytest.mark.slow),
        dict(shards=2, accumulates=False),
        dict(offload=True),
    ],
)
def test_few_layers_represent_all_of_them_in_both_places(changes):
    few, full = (trace_step(LLAMA, step_with(SPEC, **changes), all_layers=every) for every in (False, True))
    assert few.stand_ins and not full.stand_ins
    for place in ("on_device", "in_ram"):
        ours, theirs = (getattr(one.step, place)().peaks() for one in (few, full))
        for phase, less in (("load", 1200), ("optimizer", 2000)):
            assert ours.pop(phase).bytes == pytest.approx(theirs.pop(phase).bytes, abs=less)
        assert ours == theirs


@pytest.mark.thorough
def test_memory_of_other_sizes_follows_from_the_same_traces():
    traces = Traces(LLAMA)
    for rows in (2, 3, 7):
        spec = replace(SPEC, batch=PaddedRows(rows, 512))
        step, traced = traces.step(spec), trace_step(LLAMA, spec).step
        assert step.in_ram().peaks() == traced.in_ram().peaks()
        assert step.on_device().peaks()["backward"] == traced.on_device().peaks()["backward"]


def test_a_machine_needs_pinned_blocks_for_each_of_its_processes():
    spec = replace(SPEC, batch=PaddedRows(3, 512))  # 768 KiB become a block of 1 MiB
    host = host_budget(200 * GIB, 2)
    memory = estimate([SizedStep(trace_step(LLAMA, spec).step)], device_budget("cuda", 24 * GIB, host=host))
    assert memory.host.terms == {"activations": 6 << 20} and memory.host.saved_bytes == 0
    assert memory.host.needed_bytes == 2 * (host.own_bytes + (6 << 20))
    assert memory.fits
    little = device_budget("cuda", 24 * GIB, host=host_budget(6 * GIB, 2))
    assert not estimate([SizedStep(trace_step(LLAMA, spec).step)], little).fits
