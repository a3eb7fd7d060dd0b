"""The time of a step: device profile times traced work, what is exchanged, what is updated; ranks as a roofline does."""

import numpy as np
import pytest

from benchmarks.small_models import small_config
from benchmarks.steps import step_of, step_with
from sft_play.config.schema import RunConfig
from sft_play.machine.gpus import what_if
from sft_play.machine.links import host_link
from sft_play.planning.request import Request
from sft_play.planning.rows.facts import DataFacts
from sft_play.planning.speed.clock import plan_clock, step_seconds, with_range
from sft_play.planning.speed.profile import MicroBatch, derived_from_data_sheet
from sft_play.sizing.estimate.estimator import shared_traces
from sft_play.sizing.facts.architecture import Architecture
from sft_play.sizing.step import PaddedRows
from tests.plans import plan_with
from tests.unit.train.plans import PLAN

LARGE = Architecture.of(
    small_config(
        "llama", dict(hidden=4096, inner=14336, heads=32, groups=8, head_dim=128, vocabulary=32000, layers=32)
    )
)  # 7B
H100 = derived_from_data_sheet("H100", "cuda", 989e12, 3.35e12)
A100 = derived_from_data_sheet("A100", "cuda", 312e12, 2.04e12)
SPEC = step_of(
    mode="lora", dtype="bfloat16", mixed_precision="bf16", device="cuda", batch=PaddedRows(2, 1024)
)


def step(profile=H100, tokens=8192, **changes):
    names = ("accumulation", "exchange")
    values = {name: changes.pop(name) for name in names if name in changes}
    work = shared_traces(LARGE).work(step_with(SPEC, **changes)).at(tokens)
    return step_seconds(work, profile, MicroBatch(tokens, tokens * 1024), **values)


def test_large_batches_run_at_a_plausible_share_of_the_peak():
    weights = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 32000 * 4096
    flop = 4 * weights * 65536
    assert 0.25 < flop / sum(step(tokens=65536)) / 989e12 < 0.7


def test_a_tiny_batch_is_held_up_by_calls_and_weights():
    assert sum(step(tokens=1)) == pytest.approx(sum(step(tokens=16)), rel=0.05)


@pytest.mark.thorough
def test_more_work_takes_longer():
    assert 1.25 < sum(step(activations="recompute")) / sum(step()) < 1.6
    assert step(mode="full").backward > step().backward and step(mode="full").update > 10 * step().update
    assert sum(step(profile=A100)) > 1.8 * sum(step())
    assert step(accumulation=3).forward == pytest.approx(3 * step().forward)


def test_what_is_exchanged_comes_on_top():
    assert sum(step(exchange=0.1)) - sum(step()) == pytest.approx(0.1)


def test_inputs_in_ram_take_the_time_of_their_way_over_the_link():
    """Each goes there and back once; 2 rows of 1,024 tokens x 4,096 in bf16, of 32 layers."""
    run = RunConfig.model_validate({"model": {"name": "m"}, "data": {"train_path": "d"}})
    rows = np.full(8, 1024)
    facts = DataFacts(rows, rows, 1024, 1024, 1024.0**2, seed=0)
    plan = plan_with(
        PLAN, micro_batch_tokens=2048, max_seq_len=1024, sequence_tokens=1024, device="cuda", dtype="bfloat16",
        mixed_precision="bf16", attention="varlen_sdpa", gradient_accumulation_steps=4,
        compute_capability=(8, 9),
    )  # fmt: skip
    machine = what_if("RTX 4090", 1)
    request = Request(run, LARGE, facts, machine, 1)
    seconds = plan_clock(request)
    here, away = (seconds(run, plan_with(plan, activations=way)) for way in ("recompute", "offload"))
    copied = 2 * 32 * 2 * 1024 * 4096 * 2  # bytes of a micro-batch
    assert away - here == pytest.approx(4 * copied / host_link(machine).slowest, rel=0.05)
    ranged = with_range(request, plan_with(plan, activations="offload", step_seconds=away))
    assert ranged.step_seconds_range == pytest.approx(
        (here, away), rel=1e-4
    )  # beside computation, or after it
    assert ranged.step_seconds_range_reason == "to RAM over PCIe 4.0 x 16, or x 8"


def test_a_step_takes_as_long_as_that_of_the_process_with_most_tokens():
    """Of 16 rows, four of twelve processes have two, as all have of 24; of two rows, the longer one counts."""
    run = RunConfig.model_validate({"model": {"name": "m"}, "data": {"train_path": "d"}})
    plan = plan_with(
        PLAN, max_seq_len=1024, sequence_tokens=1024, device="cuda", dtype="bfloat16", mixed_precision="bf16",
        attention="varlen_sdpa", gradient_accumulation_steps=1, compute_capability=(8, 9), engine="ddp",
        micro_batch_size=2, micro_batch_tokens=2048, total_steps=1,
    )  # fmt: skip

    def seconds(lengths, processes):
        lengths = np.array(lengths)
        facts = DataFacts(lengths, lengths, 1024, lengths.mean(), (lengths.astype(float) ** 2).mean(), seed=0)
        request = Request(run, LARGE, facts, what_if("RTX 4090", processes), processes)
        return plan_clock(request, link=False)(
            run, plan_with(plan, effective_batch_size=len(lengths), world_size=processes)
        )

    two_each = seconds(24 * [1024], 12)
    assert seconds(16 * [1024], 12) == pytest.approx(two_each)
    assert seconds(12 * [1024], 12) < 0.7 * two_each
    assert seconds([1024, 16], 2) == pytest.approx(seconds([1024, 1024], 2), rel=0.01)
