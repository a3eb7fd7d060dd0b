"""The trace of a step whose weights are divided among processes."""

import random
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import distributed
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.small_models import TALL, WIDE, small_config
from benchmarks.steps import step_of, step_with
from sft_play.config.schema import LoraSettings, RunConfig
from sft_play.engines import shards
from sft_play.engines.registry import engine_of
from sft_play.errors import ConfigError
from sft_play.sizing.estimate.allocator import replay_steps
from sft_play.sizing.step import JoinedRows, PaddedRows, StepSpec
from sft_play.sizing.trace import sharded
from sft_play.sizing.trace.sharded import silent_group
from sft_play.sizing.trace.trace import trace_step
from sft_play.timeline import TERMS
from sft_play.work import ALL_GATHER, ALL_REDUCE, FREE, REDUCE_SCATTER, Work
from tests.plans import plan_of, plan_with
from tests.unit.train.plans import PLAN

SMALL = WIDE | {"layers": 4, "vocabulary": 300}
LLAMA = small_config("llama", SMALL)


def spec(**changes) -> StepSpec:
    """A full fine-tuning in fp32 on the CPU, among two processes."""
    settings = dict(
        mode="full", lora=LoraSettings(r=4), batch=PaddedRows(2, 128), shards=2, accumulates=False
    )
    return step_of(**settings | changes)


ON_GPU = dict(device="cuda", dtype="bfloat16", mixed_precision="bf16")


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.thorough) for n in range(1, 8))])
def test_a_first_pass_without_computing_leaves_every_byte_of_a_step_as_it_is(seed, monkeypatch):
    draw = random.Random(seed)
    step = spec(
        mode=draw.choice(["full", "lora", "qlora"]),
        shards=draw.choice([2, 3]),
        replicated=draw.random() < 0.3,
        accumulates=draw.random() < 0.7,
        reshard_after_forward=draw.random() < 0.7,
        offload=draw.random() < 0.3,
        activations=draw.choice(["keep", "recompute"]),
        **ON_GPU,
    )
    step = step_with(step, defers_exchange=step.accumulates and draw.random() < 0.5)
    config = small_config(draw.choice(["llama", "qwen3_moe"]), SMALL)
    found = trace_step(config, step)
    monkeypatch.setattr(sharded, "changes_in_a_pass", lambda model: True)
    computed = trace_step(config, step)
    assert found.same_structure(computed) and found.sizes.tobytes() == computed.sizes.tobytes()
    assert found.work.sizes.tobytes() == computed.work.sizes.tobytes()


def ran(work: Work) -> list[tuple]:
    """The operations, in their order."""
    about = work.kinds, work.dtypes, work.by_python, work.by_engine, *work.sizes.T
    return [*zip(*(column[work.order].tolist() for column in about), work.layers.tolist(), strict=True)]


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.thorough) for n in range(1, 8))])
def test_what_a_step_computes_that_sends_less_follows_from_another_trace(seed):
    """All of it if weights stay gathered; if gradients wait, what it computes at least."""
    draw = random.Random(seed)
    step = spec(
        mode=draw.choice(["full", "lora", "qlora"]),
        shards=draw.choice([2, 3]),
        accumulates=draw.random() < 0.8,
        activations=draw.choice(["keep", "recompute"]),
        **draw.choice([ON_GPU, {}, dict(ON_GPU, dtype="float32")]),
    )
    config = small_config(draw.choice(["llama", "qwen3_moe", "gemma2"]), SMALL)
    derived = trace_step(config, step).work.kept_gathered()
    found = trace_step(config, step_with(step, reshard_after_forward=False)).work
    assert (ran(derived), derived.backward_from) == (ran(found), found.backward_from)
    waits = trace_step(config, step_with(step, reshard_after_forward=False, defers_exchange=True)).work
    # a gradient that is not added to an earlier one takes a view instead
    least, most = (
        Counter(each[:-1] for each in ran(work) if each[0] != FREE) for work in (derived.unexchanged(), waits)
    )
    assert least <= most


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", dict(accumulates=True, reshard_after_forward=False)),
        ("llama", dict(mode="qlora", activations="recompute", batch=JoinedRows(192), longest=96, **ON_GPU)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("gemma3_text", dict(mode="lora", shards=3, accumulates=True, **ON_GPU)),
                ("qwen3_moe", dict(activations="recompute", mixed_precision="bf16", device="cuda")),
            )
        ),
    ],
)
def test_few_layers_represent_all_of_a_divided_model_to_the_byte(name, changes):
    """The norms of gradients are stacked into one tensor, which has only the traced layers' norms."""
    config = small_config(name, SMALL)
    few, full = (trace_step(config, spec(**changes), all_layers=every) for every in (False, True))
    assert few.stand_ins == (0, 1, 1, 2) and not full.stand_ins
    few, full = few.step.peaks(), full.step.peaks()
    assert few.pop("optimizer").bytes == pytest.approx(full.pop("optimizer").bytes, abs=2000)
    assert few == full


@pytest.mark.thorough
def test_layers_of_several_shapes_are_all_traced():
    """A layer's weights are gathered while its neighbor runs, so what stands for it must be as large."""
    config = small_config("qwen3_moe", SMALL, mlp_only_layers=[1])
    assert not trace_step(config, spec(mode="lora")).stand_ins


@pytest.mark.thorough
@pytest.mark.parametrize("shards", [1, 2])
def test_optimizer_states_outlive_the_step(shards):
    """What frees them at the end of a trace must not be in it: a replay of the allocator would reuse them."""
    trace = trace_step(LLAMA, spec(mode="lora", shards=shards))
    states = trace.terms == TERMS.index("optimizer")
    freed = -trace.events[trace.events < 0] - 1
    assert states.sum() == 3 * 42 and not states[freed].any()


@pytest.mark.thorough
def test_replicas_hold_what_one_holds_and_reduce_the_gradients_of_their_part():
    """As many all-reduces as reduce-scatters, each of what a process keeps of the sum."""
    one, two = (trace_step(LLAMA, spec(replicated=replicated)) for replicated in (False, True))
    peaks = [{phase: peak.bytes for phase, peak in trace.step.peaks().items()} for trace in (one, two)]
    assert peaks[1] == pytest.approx(peaks[0], rel=0, abs=16)  # what tells the processes apart
    scattered, reduced = (two.work.exchanged(kind) for kind in (REDUCE_SCATTER, ALL_REDUCE))
    assert scattered == {2 * size: times for size, times in reduced.items()} and reduced
    assert not one.work.exchanged(ALL_REDUCE)


@pytest.fixture(scope="module")
def steps():
    """The same step among 2 and 512 processes."""
    return {shards: trace_step(LLAMA, spec(shards=shards)) for shards in (2, 512)}


@pytest.mark.thorough
def test_a_trace_does_not_grow_with_the_number_of_processes(steps):
    assert len(steps[2].events) == len(steps[512].events)
    assert steps[2].same_structure(steps[512])


def test_what_a_process_holds_is_its_share_of_all_and_one_layer(steps):
    """Of weights, two moments and gradients in fp32; units of few rows are padded among 512."""
    elements = steps[2].work.trained_elements
    terms = steps[2].step.peaks()["optimizer"].terms
    assert terms["weights"] == pytest.approx(2 * elements, rel=0.001)  # and a buffer
    assert terms["optimizer"] == pytest.approx(4 * elements, rel=0.001)
    assert terms["gradients"] == pytest.approx(2 * elements, rel=0.001)
    few, many = (steps[count].step.peaks() for count in (2, 512))
    assert many["optimizer"].bytes < few["optimizer"].bytes / 50
    assert many["load"].bytes < few["load"].bytes


@pytest.mark.thorough
def test_a_gpu_gets_one_whole_layer_at_a_time_while_it_loads():
    base = LLAMA.vocab_size * LLAMA.hidden_size * 2
    peaks = trace_step(LLAMA, spec(mode="lora", **ON_GPU)).step.peaks()
    kept = peaks["optimizer"].terms["weights"] + peaks["optimizer"].terms["adapters"]
    layer = 2 * (2 * 256 * 256 + 2 * 256 * 64 + 3 * 256 * 704)
    assert kept < peaks["load"].bytes < kept + layer + base


def test_weights_are_gathered_twice_and_the_last_unit_once(steps):
    """It stays for the backward pass. All gradients are reduced once."""
    work, config = steps[2].work, LLAMA
    tail = 4 * (config.vocab_size * config.hidden_size + config.hidden_size)
    everything = 4 * work.trained_elements
    sent = {
        kind: sum(size * times for size, times in work.exchanged(kind).items())
        for kind in (ALL_GATHER, REDUCE_SCATTER)
    }
    assert sent == {ALL_GATHER: 2 * everything - tail, REDUCE_SCATTER: everything}
    messages = engine_of("fsdp2").messages(work, 4, plan_with(PLAN, gradient_accumulation_steps=3))
    assert sum(one.tensor_bytes * one.times for one in messages) == 3 * sum(sent.values())


def test_weights_that_stay_gathered_are_gathered_once_until_the_backward_pass_is_over(steps):
    """All of them are there when it begins, beside the shards; an evaluation holds no more than before."""
    kept = trace_step(LLAMA, spec(reshard_after_forward=False))
    everything = 4 * steps[2].work.trained_elements
    assert sum(size * times for size, times in kept.work.exchanged(ALL_GATHER).items()) == everything
    assert kept.work.exchanged(REDUCE_SCATTER) == steps[2].work.exchanged(REDUCE_SCATTER)
    more, less = (trace.step.peaks() for trace in (kept, steps[2]))
    assert {phase for phase in more if more[phase] != less[phase]} == {"forward", "backward"}
    assert more["forward"].terms["engine"] > everything > less["forward"].terms["engine"]


@pytest.mark.thorough
def test_what_fully_shard_allocates_on_other_streams_is_not_for_computation():
    """By source, on a GPU: buffers to gather in, and gradients that are reduced, for which nothing is freed."""
    trace = trace_step(LLAMA, spec(mixed_precision="bf16", device="cuda"))
    elements = trace.work.trained_elements
    step = trace.step.rounded(512)
    streams = step.timeline.streams[step.timeline.source]
    sizes = [step.sizes[step.timeline.source][streams == number].sum() for number in range(3)]
    assert set(streams) == {0, 1, 2}
    assert sizes[2] == pytest.approx(2 * elements, rel=0.01)  # fp32 gradients of a half
    # in bf16, for two passes and an evaluation: all weights, a half of them as they are sent
    tail = LLAMA.vocab_size * LLAMA.hidden_size + LLAMA.hidden_size
    assert sizes[1] == pytest.approx((2 + 1) * (3 * elements - tail), rel=0.01)
    alone = replace(step.timeline, streams=np.zeros_like(step.timeline.streams))
    one, many = (replay_steps(each) for each in (replace(step, timeline=alone), step))
    assert many.requested == one.requested and many.reserved > one.reserved
    assert not trace_step(LLAMA, spec(regathers=True, device="cuda")).streams.any()  # DeepSpeed's are others


def test_zero3_gathers_what_belongs_to_no_layer_once_more(steps):
    """Embedding and head are one unit here or two; it is freed after the forward pass."""
    again = trace_step(LLAMA, spec(regathers=True))
    tail = 4 * (LLAMA.vocab_size * LLAMA.hidden_size + LLAMA.hidden_size)
    more, less = (
        sum(size * times for size, times in trace.work.exchanged(ALL_GATHER).items())
        for trace in (again, steps[2])
    )
    assert more - less == tail
    held, freed = (trace.step.peaks()["optimizer"] for trace in (steps[2], again))
    assert held == freed
    messages = engine_of("deepspeed_z3").messages(again.work, 4, PLAN)
    assert {message.kind for message in messages} == {"all_gather", "reduce_scatter"}


@pytest.mark.thorough
def test_zero3_keeps_gathered_weights_of_which_the_backward_pass_needs_a_view():
    """PEFT computes with views of the adapters of four experts; those of a layer's 3 predecessors are there."""
    config = small_config("mixtral", SMALL)
    kept, recomputed = (
        trace_step(config, spec(mode="lora", regathers=True, activations=way)).step.peaks()["forward"].terms
        for way in ("keep", "recompute")
    )
    rank, hidden, inner = 4 * 4, 256, 704
    adapters = 4 * rank * ((hidden + 2 * inner) + (inner + hidden))
    assert kept["engine"] - recomputed["engine"] == 3 * adapters


@pytest.mark.thorough
def test_weights_that_autocast_would_cast_are_gathered_in_16_bits():
    config = small_config("llama", SMALL | {"layers": 3})
    whole, half = (
        trace_step(config, spec(mixed_precision=precision, device="cuda")).work
        for precision in ("no", "bf16")
    )
    sizes = [sorted(work.exchanged(ALL_GATHER)) for work in (whole, half)]
    assert sizes[0] == [2 * size for size in sizes[1]]
    assert whole.exchanged(REDUCE_SCATTER) == half.exchanged(REDUCE_SCATTER)  # gradients are reduced in fp32


def test_gradients_of_earlier_micro_batches_are_shards(steps):
    again = trace_step(LLAMA, spec(accumulates=True)).step.peaks()
    alone = steps[2].step.peaks()
    shards = alone["optimizer"].terms["gradients"]
    assert again["forward"].bytes - alone["forward"].bytes == shards
    assert again["forward"].terms["gradients"] == shards
    assert again["optimizer"].bytes == alone["optimizer"].bytes


@pytest.mark.thorough
def test_gradients_that_wait_for_the_last_micro_batch_are_whole(steps):
    """There are as many bytes of them as of weights, until the backward pass reduces them layer by layer."""
    waiting = trace_step(LLAMA, spec(accumulates=True, defers_exchange=True)).step.peaks()
    elements = steps[2].work.trained_elements
    assert waiting["forward"].terms["gradients"] == pytest.approx(4 * elements, rel=0.001)
    assert waiting["optimizer"].terms == steps[2].step.peaks()["optimizer"].terms
    half = trace_step(LLAMA, spec(accumulates=True, defers_exchange=True, mixed_precision="bf16"))
    assert half.step.peaks()["forward"].terms["gradients"] == pytest.approx(4 * elements, rel=0.001)


@pytest.mark.thorough
def test_gradients_that_wait_are_whole_until_the_end_of_a_micro_batch_that_is_not_the_last(steps):
    """The last one reduces them layer by layer; after another one, nothing is updated."""
    few = dict(accumulates=False, defers_exchange=True, batch=PaddedRows(2, 4))
    last, first = (
        trace_step(LLAMA, spec(**few, exchanges=exchanges)).step.peaks() for exchanges in (True, False)
    )
    whole = 4 * steps[2].work.trained_elements
    held = first["backward"].terms["weights"] + first["backward"].terms["optimizer"]
    assert last["forward"] == first["forward"]
    assert last["backward"].bytes < first["backward"].bytes
    assert first["backward"].bytes > held + whole
    assert first["optimizer"].bytes < last["optimizer"].bytes


@pytest.mark.thorough
def test_replicas_keep_their_own_sum_of_gradients_until_the_last_micro_batch(steps):
    """It is as large as the shards of all processes' gradients would be."""
    one, more = (trace_step(LLAMA, spec(accumulates=True, replicated=many)) for many in (False, True))
    peaks = [trace.step.peaks()["forward"] for trace in (one, more)]
    assert peaks[0].bytes == pytest.approx(peaks[1].bytes, rel=0.001)
    assert peaks[0].terms["gradients"] == pytest.approx(peaks[1].terms["gradients"], rel=0.001)


@pytest.mark.thorough
def test_four_bit_weights_are_divided_and_their_scales_are_not():
    peaks = [
        trace_step(LLAMA, spec(mode="qlora", shards=count, **ON_GPU))
        .step.peaks()["optimizer"]
        .terms["weights"]
        for count in (1, 2, 4)
    ]
    packed = 4 * (peaks[1] - peaks[2])  # of which a quarter is the difference
    assert peaks[0] - peaks[1] == pytest.approx(packed / 2, rel=0.001)
    assert peaks[0] > packed  # what all processes hold: scales and buffers


def test_a_trace_leaves_the_process_group_that_it_runs_in_alone(tmp_path):
    """Ranks of a run plan again once they know what communication costs."""
    hook = sys.excepthook
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        ours = sys.excepthook
        with silent_group(4):
            assert distributed.get_world_size() == 4
        assert distributed.get_world_size() == 1
        trace_step(small_config("llama", SMALL | {"layers": 3}), spec(mode="lora"))
        assert distributed.get_world_size() == 1 and sys.excepthook is ours
        one = torch.ones(1)
        distributed.all_reduce(one)
        assert one.item() == 1
    finally:
        distributed.destroy_process_group()
        sys.excepthook = hook


def test_what_is_trained_of_a_layer_must_have_one_type():
    """torch would find out in the first pass; a head by itself may be in 16 bits."""
    sixteen = dict(mode="lora", dtype="bfloat16", mixed_precision="no")
    trace_step(LLAMA, spec(lora=LoraSettings(r=4, modules_to_save=["lm_head"]), **sixteen))
    beside_adapters = LoraSettings(r=4, modules_to_save=["input_layernorm"])
    with pytest.raises(
        ConfigError, match=r"for all trained weights, found: bfloat16, float32.*mixed_precision=bf16"
    ):
        trace_step(LLAMA, spec(lora=beside_adapters, **sixteen))


def norm_of_parts() -> float:
    """Of two tensors of which each of two processes has a 1; nothing is sent, so it is that of one process."""
    mesh = shards.process_mesh("cpu")
    parts = [distribute_tensor(torch.ones(2), mesh, [Shard(0)]) for _ in range(2)]
    return torch.nn.utils.get_total_norm(parts).full_tensor().item()


def test_torch_forgets_the_groups_of_a_trace():
    """A rank of torchrun plans itself, and torch remembers by the size of a mesh how its groups are called."""
    with silent_group(2):
        found = [norm_of_parts()]
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        found.append(norm_of_parts())
        if torch.__version__ >= "2.12":  # before, groups that send nothing left results unwritten
            assert found == pytest.approx([2**0.5] * 2)
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("engine", "accumulation", "shards", "accumulates"),
    [("fsdp2", 1, 4, False), ("fsdp2", 2, 4, True), ("ddp", 1, 1, True), ("none", 2, 1, True)],
)
def test_an_engine_that_divides_weights_keeps_no_whole_gradients(engine, accumulation, shards, accumulates):
    run = RunConfig.model_validate({"model": {"name": "a/b"}, "data": {"train_path": "x"}})
    plan = plan_of(
        micro_batch_size=2,
        gradient_accumulation_steps=accumulation,
        effective_batch_size=8 * accumulation,
        world_size=4 if engine != "none" else 1,
        max_seq_len=128,
        packing=False,
        mixed_precision="no",
        dtype="float32",
        attention="sdpa",
        learning_rate=1e-4,
        steps_per_epoch=1,
        total_steps=1,
        engine=engine,
        activations="keep",
        device="cpu",
        micro_batch_tokens=256,
    )
    found = StepSpec.of(run, plan)
    assert (found.sharing.shards, found.accumulates) == (shards, accumulates)


@pytest.mark.thorough
def test_rows_that_no_number_of_processes_divides_are_padded():
    """160 rows among 3: each process holds 54, and sends and gets as many."""
    config = small_config("llama", TALL | {"layers": 3})
    traces = {shards: trace_step(config, spec(shards=shards)).work for shards in (2, 3)}
    gathered = {shards: sum(work.exchanged(REDUCE_SCATTER).elements()) for shards, work in traces.items()}
    assert gathered[2] == 4 * traces[2].trained_elements < gathered[3]
