"""The time of a step: device profile times traced work, what is exchanged, what is updated; ranks as a roofline does."""

from dataclasses import replace

import pytest

from benchmarks.small_models import small_config
from sft_play.planning.clock import step_seconds
from sft_play.planning.profile import MicroBatch, derived_from_data_sheet
from sft_play.sizing.estimator import shared_traces
from sft_play.sizing.step import PaddedRows, StepSpec

LARGE = small_config(
    "llama", dict(hidden=4096, inner=14336, heads=32, groups=8, head_dim=128, vocabulary=32000, layers=32)
)  # 7B
H100 = derived_from_data_sheet("H100", "cuda", 989e12, 3.35e12)
A100 = derived_from_data_sheet("A100", "cuda", 312e12, 2.04e12)
SPEC = StepSpec(
    mode="lora", dtype="bfloat16", mixed_precision="bf16", device="cuda", batch=PaddedRows(2, 1024)
)


def step(profile=H100, tokens=8192, **changes):
    names = ("accumulation", "exchange")
    values = {name: changes.pop(name) for name in names if name in changes}
    work = shared_traces(LARGE).work(replace(SPEC, **changes)).at(tokens)
    return step_seconds(work, profile, MicroBatch(tokens, tokens * 1024), **values)


def test_large_batches_run_at_a_plausible_share_of_the_peak():
    weights = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 32000 * 4096
    flop = 4 * weights * 65536
    assert 0.25 < flop / sum(step(tokens=65536)) / 989e12 < 0.7


def test_a_tiny_batch_is_held_up_by_calls_and_weights():
    assert sum(step(tokens=1)) == pytest.approx(sum(step(tokens=16)), rel=0.05)


def test_more_work_takes_longer():
    assert 1.25 < sum(step(activations="recompute")) / sum(step()) < 1.6
    assert step(mode="full").backward > step().backward and step(mode="full").update > 10 * step().update
    assert sum(step(profile=A100)) > 1.8 * sum(step())
    assert step(accumulation=3).forward == pytest.approx(3 * step().forward)


def test_what_is_exchanged_comes_on_top():
    assert sum(step(exchange=0.1)) - sum(step()) == pytest.approx(0.1)
