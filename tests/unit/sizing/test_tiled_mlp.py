"""The memory of steps whose MLPs compute in tiles."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.small_models import WIDE, small_config
from benchmarks.steps import step_of, step_with
from sft_play.config.schema import LoraSettings
from sft_play.sizing.estimate.estimator import Traces
from sft_play.sizing.step import JoinedRows, PaddedRows
from sft_play.sizing.trace.trace import trace_step
from sft_play.work import PRODUCT
from tests.unit.sizing.real_step import require_predicted

LORA = LoraSettings(r=4)
SMALL = WIDE | {"layers": 6, "vocabulary": 300}
LLAMA = small_config("llama", SMALL)
SPEC = step_of(mode="full", lora=LORA, activations="recompute", batch=PaddedRows(2, 128), mlp_tile=64)
ON_GPU = dict(device="cuda", dtype="bfloat16", mixed_precision="bf16")


def slow(*values: Any) -> Any:
    """A case of `make test-faults`."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        slow("llama", dict(mode="qlora", mixed_precision="bf16")),
        slow("llama", dict(mode="lora", shards=2, accumulates=False, **ON_GPU)),
        ("llama", dict(activations="offload", **ON_GPU)),
        slow("gemma3_text", dict(batch=JoinedRows(300), longest=128, **ON_GPU)),
    ],
)
def test_few_layers_represent_all_to_the_byte(name, changes):
    """But for the norms of gradients, of which the traced layers have fewer, and QLoRA's order of loading."""
    config = small_config(name, SMALL, **(dict(sliding_window=64) if name == "gemma3_text" else {}))
    few, full = (trace_step(config, step_with(SPEC, **changes), all_layers=each) for each in (False, True))
    assert few.stand_ins and not full.stand_ins
    for place in ("on_device", "in_ram"):
        ours, theirs = (getattr(one.step, place)().peaks() for one in (few, full))
        for phase, less in (("load", 1200), ("optimizer", 2000)):
            assert ours.pop(phase).bytes == pytest.approx(theirs.pop(phase).bytes, rel=0, abs=less)
        assert ours == theirs


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "mode"), [("llama", "lora"), ("gpt2", "full"), slow("llama", "full"), slow("gpt2", "lora")]
)
def test_the_real_step_allocates_what_the_trace_says(mode, name):
    config = small_config(name, SMALL | {"layers": 3})
    spec = replace(SPEC, mode=mode, batch=PaddedRows(3, 64), mlp_tile=50)
    require_predicted(config, spec)


@pytest.mark.thorough
def test_tiles_take_less_forward_backward_and_in_evaluation():
    """Of a wide MLP, a tile exists at a time; the last one of a step is as it was."""
    wide = small_config("llama", SMALL | {"inner": 2048, "layers": 3})
    batch = dict(
        batch=JoinedRows(1024), longest=1024, supervised_share=0.05
    )  # so that no phase ends in the head
    spec = step_with(SPEC, mode="lora", **batch, **ON_GPU)
    whole, tiled = (trace_step(wide, replace(spec, mlp_tile=tile)) for tile in (0, 128))
    before, after = whole.step.peaks(), tiled.step.peaks()
    intermediate = 1024 * 2048 * 2  # gate, up or their product, in bf16
    for phase, tensors in (("forward", 1), ("backward", 3), ("evaluation", 1)):
        assert before[phase].bytes - after[phase].bytes > tensors * intermediate * 7 / 8, phase


def test_an_mlp_is_computed_once_more_but_for_its_last_tile():
    """Without tiles, a layer is computed twice; its recomputation ends with the last input of a tile."""
    works = [trace_step(LLAMA, replace(SPEC, mlp_tile=tile)).work for tile in (0, 64)]
    tokens = []
    for work in works:
        forward = (work.kinds == PRODUCT) & work.by_python & (work.sizes[:, 1] == 704)
        order = work.order[forward[work.order]]
        tokens.append((work.sizes[order, 0] * work.sizes[order, 3]).sum())
    up_and_gate, layers = 2, 6
    assert tokens[0] == up_and_gate * layers * 2 * 256
    assert tokens[1] == up_and_gate * layers * (2 * 256 + 192)


@pytest.mark.thorough
def test_steps_with_as_many_tiles_follow_from_two_traces():
    """To the byte, as if each were traced; one with another number of tiles is traced itself."""
    traces = Traces(LLAMA)
    for tokens, count in ((250, 1), (200, 2), (241, 2), (256, 2), (257, 3)):
        spec, before = replace(SPEC, batch=JoinedRows(tokens), longest=100), traces.count
        found = traces.step(spec).peaks()
        assert traces.count == count
        if count == before:  # it follows from others
            assert found == trace_step(LLAMA, spec).step.peaks(), tokens
    assert traces.work(spec).at(spec.tokens).trained_elements and traces.count == 3
