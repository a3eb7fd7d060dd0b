"""Which layers are traced where some keep their activations and others are recomputed, and what that gives."""

from collections import Counter
from itertools import product

import pytest

from benchmarks.small_models import WIDE, small_config
from benchmarks.steps import step_of, step_with
from sft_play.config.schema import LoraSettings
from sft_play.errors import UntraceableModel
from sft_play.sizing.estimate.estimator import Traces
from sft_play.sizing.step import JoinedRows, PaddedRows
from sft_play.sizing.trace.layers import choose_layers, fewest_apart, stand_ins_of, told_apart
from sft_play.sizing.trace.trace import trace_step
from sft_play.work import mixed
from tests.unit.sizing.real_step import require_predicted

LORA = LoraSettings(r=4)
SMALL = WIDE | {"layers": 8, "vocabulary": 300}
LLAMA = small_config("llama", SMALL)
SPEC = step_of(mode="full", lora=LORA, activations="recompute", batch=PaddedRows(2, 128))
ON_GPU = dict(device="cuda", dtype="bfloat16", mixed_precision="bf16")


def test_kept_layers_and_the_one_before_them_are_of_other_kinds():
    assert told_apart([0] * 6, 0) == [0] * 6
    assert choose_layers(told_apart([0] * 6, 2)) == ([0, 1, 3, 4, 5], (0, 1, 1, 2, 3, 4))
    assert stand_ins_of([0] * 6, 3) == (0, 1, 2, 3, 3, 4)


@pytest.mark.parametrize("kinds", [[0] * 9, [0, 0, 1] * 3, [0, 1, 1, 1, 0, 2]])
def test_one_trace_gives_every_number_of_kept_layers_with_the_same_kinds(kinds):
    for kept in range(1, len(kinds)):
        fewest = fewest_apart(kinds, kept)
        assert 1 <= fewest <= kept and max(stand_ins_of(kinds, fewest)) == max(stand_ins_of(kinds, kept))
    assert {fewest_apart([0] * 9, kept) for kept in range(1, 9)} == {1, 2, 7, 8}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kept", "name", "changes"),
    [
        case
        if case[:2]
        == (4, "gemma3_text")  # divided ones are in test_sharded.py and in the work of a mix below
        else pytest.param(*case, marks=pytest.mark.slow)
        for kept in (1, 4)
        for case in (
            (kept, "llama", dict(mode="lora", shards=2, accumulates=False, **ON_GPU)),
            # what a layer hands on lives longer if the next one is recomputed; layers with and without a window
            (kept, "gemma3_text", dict(batch=JoinedRows(256), longest=128, **ON_GPU)),
        )
    ]
    + [
        pytest.param(kept, "llama", dict(mode="qlora", mixed_precision="bf16"), marks=pytest.mark.slow)
        for kept in (1, 4)
    ],
)
def test_few_layers_represent_all_of_a_mix_to_the_byte(name, changes, kept):
    """But for the norms of gradients, of which the traced layers have fewer, and QLoRA's order of loading."""
    config = small_config(name, SMALL, **(dict(sliding_window=64) if name == "gemma3_text" else {}))
    spec = step_with(SPEC, kept_layers=kept, **changes)
    few, full = (trace_step(config, spec, all_layers=every) for every in (False, True))
    assert few.stand_ins and not full.stand_ins
    few, full = few.step.peaks(), full.step.peaks()
    for phase, less in (("load", 1200), ("optimizer", 1500)):
        assert few.pop(phase).bytes == pytest.approx(full.pop(phase).bytes, rel=0, abs=less)
    assert few == full


@pytest.mark.thorough
def test_memory_of_any_number_of_kept_layers_follows_from_three_traces():
    """Of 2 to 6 kept layers, and other sizes of the micro-batch; to the byte, as if each were traced."""
    traces = Traces(LLAMA)
    for kept, rows in ((4, 2), (6, 3), (2, 5)):
        spec = step_with(SPEC, kept_layers=kept, batch=PaddedRows(rows, 128))
        peaks = traces.step(spec).peaks()
        assert peaks["backward"] == trace_step(LLAMA, spec, all_layers=True).step.peaks()["backward"]
    assert traces.count <= 3


@pytest.mark.thorough
def test_each_layer_that_keeps_its_activations_takes_memory_but_the_last_one():
    """Which is whole when the backward pass begins, even if it is recomputed for that."""
    traces = Traces(LLAMA)

    def peak(**changes):
        return traces.step(step_with(SPEC, **changes)).peaks()["backward"].bytes

    peaks = [peak(kept_layers=kept) for kept in range(1, 8)]
    assert len(set(peaks)) == 7 and peaks == sorted(peaks)
    assert peaks[0] < peak() and peaks[-1] < peak(activations="keep")


def test_layers_that_cannot_be_told_apart_are_not_mixed():
    named = LoraSettings(r=4, rank_pattern={r"layers\.0\..*": 8})
    with pytest.raises(UntraceableModel, match="layers"):
        Traces(LLAMA).step(step_with(SPEC, mode="lora", lora=named, kept_layers=4))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "kept", "mode"),
    [
        case
        if case in {("llama", 3, "lora"), ("gpt2", 1, "full")}
        else pytest.param(*case, marks=pytest.mark.slow)
        for case in product(("llama", "gpt2"), (1, 3), ("full", "lora"))
    ],
)
def test_the_real_step_allocates_what_the_trace_of_a_mix_says(mode, kept, name):
    config = small_config(name, SMALL | {"layers": 5})
    spec = step_of(mode=mode, lora=LORA, activations="recompute", kept_layers=kept, batch=PaddedRows(3, 64))
    require_predicted(config, spec)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kept", "shards"),
    [(5, 1), (1, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 1), (5, 2)))],
)
def test_the_work_of_a_mix_is_that_of_its_layers(shards, kept):
    spec = step_with(SPEC, shards=shards)
    ways = (trace_step(LLAMA, step_with(spec, activations=way)).work for way in ("keep", "recompute"))
    ours, theirs = mixed(*ways, kept), trace_step(LLAMA, step_with(spec, kept_layers=kept)).work

    def operations(work, passes):
        order, layers = work.order[passes], work.layers[passes]
        rows = zip(layers.tolist(), work.kinds[order].tolist(), work.sizes[order].tolist(), strict=True)
        return Counter((layer, kind, *sizes) for layer, kind, sizes in rows)

    for own, other in (
        (slice(ours.backward_from), slice(theirs.backward_from)),
        (slice(ours.backward_from, None), slice(theirs.backward_from, None)),
    ):
        assert operations(ours, own) == operations(theirs, other)
    in_layers = ours.layers[ours.backward_from :][ours.layers[ours.backward_from :] >= 0]
    assert (in_layers[1:] <= in_layers[:-1]).all()
