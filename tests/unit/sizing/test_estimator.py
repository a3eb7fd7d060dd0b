"""What the search asks: memory of a plan, recorded once, kept on disk."""

from dataclasses import replace

import pytest

from benchmarks.small_models import WIDE, small_config
from sft_play.config.schema import RunConfig
from sft_play.sizing import recordings
from sft_play.sizing.estimator import estimator, zero_buckets
from sft_play.sizing.memory import device_budget
from sft_play.sizing.planner import Plan
from sft_play.units import GIB


def run(mode="lora", **train) -> RunConfig:
    return RunConfig.model_validate(
        {"model": {"name": "some/model"}, "data": {"train_path": "x"}, "tuning": {"mode": mode}, "train": train}
    )


PLAN = Plan(
    micro_batch_size=2,
    gradient_accumulation_steps=4,
    effective_batch_size=8,
    world_size=1,
    engine="none",
    max_seq_len=128,
    packing=False,
    gradient_checkpointing=False,
    mixed_precision="bf16",
    dtype="bfloat16",
    attention="varlen_sdpa",
    learning_rate=1e-4,
    steps_per_epoch=1,
    total_steps=1,
    device="cuda",
)


@pytest.fixture
def estimate(tmp_path):
    return estimator(small_config("llama", WIDE), device_budget("cuda", 10 * GIB), 1.0, cache=tmp_path)


def test_a_plan_is_answered_from_disk_the_second_time(estimate, monkeypatch):
    first = estimate(run(), PLAN)
    monkeypatch.setattr(recordings, "trace_step", lambda *_, **__: pytest.fail("recorded again"))
    assert estimate(run(), PLAN) == first
    assert first.needed_bytes >= first.peak_bytes == sum(size for name, size in first.terms.items() if name != "context")


def test_target_modules_given_as_a_list_are_a_question_of_their_own(estimate):
    few = run().model_copy(update={"tuning": run().tuning.model_validate({"lora": {"target_modules": ["q_proj"]}})})
    assert estimate(few, PLAN).terms["adapters"] < estimate(run(), PLAN).terms["adapters"]


def test_zero2_on_more_gpus_needs_less_for_full_fine_tuning(estimate):
    full = run("full")
    ddp, two, eight = (
        estimate(full, replace(PLAN, engine=engine, world_size=world, dtype="float32"))
        for engine, world in (("ddp", 2), ("deepspeed_z2", 2), ("deepspeed_z2", 8))
    )
    assert ddp.terms["optimizer"] > two.terms["optimizer"] > eight.terms["optimizer"]
    assert two.terms["optimizer"] == pytest.approx(4 * eight.terms["optimizer"], rel=1e-4)


def test_zero2_holds_fp32_states_for_16_bit_weights(estimate):
    zero = replace(PLAN, engine="deepspeed_z2", world_size=4, dtype="float32")
    terms = estimate(run("full"), zero).terms
    parameters = terms["weights"] // 2
    assert terms["optimizer"] == pytest.approx(12 * parameters / 4, rel=1e-3)


def test_the_shipped_deepspeed_config_gives_the_buckets():
    assert zero_buckets().elements < 500_000_000
