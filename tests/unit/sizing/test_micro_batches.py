"""Which micro-batches of a run are looked at: of all of them, none has a higher peak."""

import random
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.miniatures import miniature
from benchmarks.small_models import WIDE, small_config
from sft_play.config.schema import RunConfig
from sft_play.sizing.estimate.estimator import Traces, steps_of
from sft_play.sizing.estimate.micro_batches import anywhere, front, heaviest, with_held
from sft_play.sizing.step import JoinedRows, MicroBatch, PaddedRows, RunBatches, StepSpec
from sft_play.sizing.trace.trace import trace_step
from sft_play.timeline import StepTrace
from sft_play.vision.types import Fit
from tests.plans import plan_of, plan_with
from tests.unit.sizing.handmade import TraceBuilder
from tests.vision_models import config_of

PLAN = plan_of(
    micro_batch_size=2, gradient_accumulation_steps=2, effective_batch_size=4, world_size=1, engine="none",
    max_seq_len=90, packing=False, micro_batch_tokens=300, activations="keep", mixed_precision="no",
    dtype="float32", attention="varlen_sdpa", learning_rate=1e-4, steps_per_epoch=1, total_steps=1, device="cpu",
)  # fmt: skip


def drawn(count: int, seed: int) -> list[MicroBatch]:
    """Joined rows of random lengths, in steps of two micro-batches."""
    pick = random.Random(seed)
    found = []
    for number in range(count):
        lengths = tuple(pick.randint(1, 90) for _ in range(pick.randint(2, 6)))
        tokens = sum(lengths)
        supervised = pick.randint(1, tokens - len(lengths))
        held = pick.randint(50, 500)
        found.append(MicroBatch(JoinedRows(tokens), supervised, lengths, first=number % 2 == 0, held=held))
    return found


@pytest.mark.parametrize(
    ("engine", "of_several", "alone"),
    [("none", False, False), ("ddp", False, True), ("deepspeed_z2", True, True), ("fsdp2", False, False)],
)
def test_whether_a_first_micro_batch_is_traced_with_gradients(engine, of_several, alone):
    """Of several under DDP it makes its own, beside the buckets that its step's last one fills."""
    run = RunConfig.model_validate({"model": {"name": "m"}, "data": {"train_path": "x"}})
    two = plan_with(PLAN, engine=engine, world_size=2)
    one = plan_with(two, gradient_accumulation_steps=1)
    first = MicroBatch(JoinedRows(8), 4, first=True)
    assert StepSpec.of(run, two, first).accumulates is of_several
    assert StepSpec.of(run, one, first).accumulates is alone
    assert StepSpec.of(run, two, replace(first, first=False)).accumulates


@pytest.mark.parametrize(("defers", "replicas"), [(True, 1), (False, 2), (False, 1)])
def test_only_the_last_micro_batch_of_a_step_reduces_gradients_that_wait(defers, replicas):
    run = RunConfig.model_validate({"model": {"name": "m"}, "data": {"train_path": "x"}})
    plan = plan_with(PLAN, engine="fsdp2", world_size=4, defers_exchange=defers, replicas=replicas)
    waits, later = defers or replicas > 1, MicroBatch(JoinedRows(8), 4)
    first = replace(later, first=True, last=False)
    for steps, places in ((2, [later]), (3, [later, replace(later, last=False)])):
        plan = plan_with(plan, gradient_accumulation_steps=steps)
        found = anywhere([later], plan)
        assert found == (places if waits else [later])
        exchanges = [StepSpec.of(run, plan, micro).exchanges for micro in (first, *found)]
        assert exchanges == ([False, True, False][: len(exchanges)] if waits else [True, True])


def test_the_front_has_what_nothing_exceeds():
    points = np.array([(3, 1), (1, 3), (2, 2), (2, 1), (3, 1), (1, 1)])
    assert sorted(map(tuple, points[front(points)].tolist())) == [(1, 3), (2, 2), (3, 1)]
    many = np.random.default_rng(0).integers(0, 50, (400, 3))
    kept = many[front(many)]
    dominated = (kept[None] >= many[:, None]).all(-1).any(1)
    assert dominated.all() and len(kept) < 100


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("llama", "full"),
        pytest.param(
            "deepseek_v3", "lora", marks=pytest.mark.slow
        ),  # whose scores grow with squares of lengths
        pytest.param("llama", "lora", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "full", marks=pytest.mark.slow),
    ],
)
def test_no_micro_batch_of_the_run_has_a_higher_peak(family, mode):
    config = small_config("llama", WIDE | {"layers": 3}) if family == "llama" else miniature(family)
    run = RunConfig.model_validate(
        {"model": {"name": "m"}, "data": {"train_path": "x"}, "tuning": {"mode": mode}}
    )
    batches = drawn(7, seed=3)
    most = 900
    steps = steps_of(Traces(config), run, PLAN, RunBatches(tuple(batches), (batches[0],), most))
    found = highest({phase: peak.bytes for phase, peak in each.step.peaks().items()} for each in steps)
    expected = highest(
        with_waiting(
            trace_step(config, StepSpec.of(run, PLAN, each, batches[0])), each, most, batches[0].held
        )
        for each in batches
    )
    for phase in expected:
        assert found[phase] == pytest.approx(expected[phase], rel=5e-4), phase


def test_the_batches_that_wait_are_beside_the_one_that_is_computed():
    trace = TraceBuilder()
    for phase in ("forward", "backward", "optimizer", "evaluation"):
        trace.segment(phase)
        trace.free(trace.allocate(10))
    spec = StepSpec(mode="full", batch=JoinedRows(7), eval_batch=JoinedRows(5))
    micro, evaluated = (MicroBatch(each, 1, held=3) for each in (JoinedRows(7), JoinedRows(5)))
    step = with_held(trace.trace(()).step, spec, PLAN, RunBatches(held=9), micro, evaluated)
    found = {phase: peak.bytes - 10 for phase, peak in step.peaks().items()}
    waiting = 24 * (9 - 7)
    passes = {"forward": 24 * 3, "backward": 24 * 3}
    assert found == passes | {"optimizer": waiting, "evaluation": waiting + 24 * 3}


def with_waiting(trace: StepTrace, micro: MicroBatch, most: int, ahead: int) -> dict[str, int]:
    """The peaks, with 24 bytes for each token of the other batches that are there in a phase."""
    waiting = dict.fromkeys(("optimizer", "evaluation"), most - micro.tokens)
    waiting |= {"load": 0, "forward": micro.held, "backward": micro.held}
    waiting["evaluation"] += ahead
    return {phase: peak.bytes + 24 * waiting[phase] for phase, peak in trace.step.peaks().items()}


def highest(all_peaks) -> dict[str, int]:
    """The highest of each phase."""
    found: dict[str, int] = {}
    for peaks in all_peaks:
        for phase, peak in peaks.items():
            found[phase] = max(found.get(phase, 0), peak)
    return found


def test_padded_rows_are_looked_at_with_most_tokens_and_with_most_supervised():
    batches = [
        MicroBatch(PaddedRows(2, 96), 40), MicroBatch(PaddedRows(2, 64), 90), MicroBatch(PaddedRows(2, 32), 50)
    ]  # fmt: skip
    assert heaviest(batches) == batches[:2]


def with_pictures(count: int, seed: int) -> list[MicroBatch]:
    """Micro-batches of Gemma 3, with pictures anywhere in their rows and beside others' pictures."""
    pick, found = random.Random(seed), []
    for micro in drawn(count, seed):
        rows = [length for length in micro.lengths if length > 16 and pick.random() < 0.7]
        fits = tuple(Fit(32, 32, 1, 1, 1, 16, begin=pick.randint(0, length - 16)) for length in rows)
        found.append(replace(micro, first=False, fits=fits, held_units=pick.randint(0, 9)))
    return found


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_peak_of_a_run_with_pictures_is_that_of_its_highest_micro_batch(seed):
    run = RunConfig.model_validate({"model": {"name": "m"}, "data": {"train_path": "x"}})
    traces, train = Traces(config_of("gemma3")), tuple(with_pictures(7, seed))
    batches = RunBatches(train, held=900, held_units=30, unit_bytes=12288)

    def peaks(found: RunBatches) -> dict[str, int]:
        steps = steps_of(traces, run, PLAN, found)
        return highest({phase: peak.bytes for phase, peak in each.step.peaks().items()} for each in steps)

    assert peaks(batches) == highest(peaks(replace(batches, train=(micro,))) for micro in train)
    assert len(steps_of(traces, run, PLAN, batches)) < len(train)  # some are covered by others
