"""Steps in which some layers keep their activations and others are recomputed: of two steps that are traced."""

import random
from collections import Counter
from itertools import product

import pytest
import torch
from packaging.version import Version

from benchmarks.small_models import WIDE, small_config
from benchmarks.steps import step_of, step_with
from sft_play.config.schema import LoraSettings
from sft_play.errors import UntraceableModel
from sft_play.sizing.estimate.estimator import Traces
from sft_play.sizing.step import JoinedRows, PaddedRows
from sft_play.sizing.trace.layers import choose_layers
from sft_play.sizing.trace.trace import trace_step
from sft_play.work import mixed
from tests.unit.sizing.real_step import require_predicted

LORA = LoraSettings(r=4)
SMALL = WIDE | {"layers": 8, "vocabulary": 300}
LLAMA = small_config("llama", SMALL)
SPEC = step_of(mode="full", lora=LORA, activations="recompute", batch=PaddedRows(2, 128))
ON_GPU = dict(device="cuda", dtype="bfloat16", mixed_precision="bf16")


SHARDED = dict(shards=2, accumulates=False, **ON_GPU)
JOINED = dict(batch=JoinedRows(256), longest=128)
ON_CPU = [{}] if Version(torch.__version__) >= Version("2.13") else []  # of 2.11, no mix is found there
# What a layer hands on lives longer if the next one is recomputed; layers of gemma3 are of two kinds.
CASES = {
    "llama": [dict(mode="lora", **SHARDED), dict(mode="qlora", **ON_GPU, **JOINED), *ON_CPU],
    "qwen3": [dict(shards=4, device="cuda", mixed_precision="bf16"), dict(mode="qlora", **SHARDED, **JOINED)],
    "gpt2": [dict(**ON_GPU), dict(mode="lora")],
    "mixtral": [dict(mode="lora", **ON_GPU, **JOINED), dict(**ON_GPU)],
    "gemma2": [dict(mode="lora", attention="eager", **ON_GPU)],
    "gemma3_text": [dict(**ON_GPU, **JOINED), dict(mode="lora", **SHARDED, **JOINED)],
}


def test_a_layer_is_traced_once_for_all_of_its_kind_that_are_neither_first_nor_last():
    assert choose_layers([0, 0, 1, 0, 1, 0]) == ([0, 1, 2, 5], (0, 1, 2, 1, 2, 3))


def require_mixed_to_the_byte(name, changes, kept, layers=6):
    """But for the norms of gradients, of which the traced layers have fewer, and QLoRA's order of loading."""
    window = dict(sliding_window=64) if name == "gemma3_text" else {}
    config = small_config(name, SMALL | {"layers": layers}, **window)
    spec = step_with(SPEC, kept_layers=kept, **changes)
    few, full = Traces(config).step(spec), trace_step(config, spec)
    assert full.stand_ins == tuple(range(layers))
    few, full = few.peaks(), full.step.peaks()
    for phase, less in (("load", 1200), ("optimizer", 1500)):
        assert few.pop(phase).bytes == pytest.approx(full.pop(phase).bytes, rel=0, abs=less)
    assert few == full


def test_a_drawn_mix_has_the_memory_of_a_trace_of_all_its_layers():
    seed = random.randrange(2**16)
    print(f"{seed=}")
    draw = random.Random(seed)
    require_mixed_to_the_byte("llama", draw.choice(CASES["llama"][1:]), draw.randint(1, 3), layers=4)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_drawn_mixes_of_many_models_have_the_memory_of_a_trace_of_all_their_layers(name):
    seed = random.randrange(2**16)
    print(f"{seed=}")
    for changes in CASES[name]:
        # of 5, no layer with gemma2's other mask would be left that is recomputed, and the mask counts as held
        require_mixed_to_the_byte(name, changes, random.Random(seed).randint(1, 4))


@pytest.mark.thorough
def test_memory_of_any_number_of_kept_layers_follows_from_six_traces():
    """Of 2 to 6 kept layers, and other sizes of the micro-batch; to the byte, as if each were traced."""
    traces = Traces(LLAMA)
    for kept, rows in ((4, 2), (6, 3), (2, 5)):
        spec = step_with(SPEC, kept_layers=kept, batch=PaddedRows(rows, 128))
        peaks = traces.step(spec).peaks()
        assert peaks["backward"] == trace_step(LLAMA, spec).step.peaks()["backward"]
    assert traces.count == 6  # three of each way, since the output head has other tiles


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
        Traces(small_config("llama", SMALL | {"layers": 2})).step(
            step_with(SPEC, mode="lora", lora=named, kept_layers=1)
        )


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
