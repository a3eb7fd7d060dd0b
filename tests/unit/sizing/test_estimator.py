"""The estimator: the memory of a plan, traced once, cached on disk."""

from pathlib import Path

import pytest

from benchmarks.small_models import WIDE, small_config
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.sizing import step
from sft_play.sizing.estimate import estimator as sizing_estimator
from sft_play.sizing.estimate.budget import device_budget
from sft_play.sizing.estimate.estimator import estimator
from sft_play.sizing.estimate.samples import is_sampled
from sft_play.sizing.step import SHARES
from sft_play.sizing.trace import trace
from sft_play.units import GIB
from tests.plans import plan_of, plan_with


def run(mode="lora", **train) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"name": "some/model"},
            "data": {"train_path": "x"},
            "tuning": {"mode": mode},
            "train": train,
        }
    )


PLAN = plan_of(
    micro_batch_size=2,
    gradient_accumulation_steps=4,
    effective_batch_size=8,
    world_size=1,
    engine="none",
    max_seq_len=128,
    packing=False,
    micro_batch_tokens=256,
    activations="keep",
    mixed_precision="bf16",
    dtype="bfloat16",
    attention="varlen_sdpa",
    learning_rate=1e-4,
    steps_per_epoch=1,
    total_steps=1,
    device="cuda",
)


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A function that makes an estimator as another process would."""
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path))

    def make(free=10 * GIB):
        monkeypatch.setattr(sizing_estimator, "_SHARED", {})
        return estimator(small_config("llama", WIDE), device_budget("cuda", free))

    return make


@pytest.fixture
def estimate(fresh):
    return fresh()


@pytest.mark.thorough
def test_what_was_traced_is_read_the_second_time_for_any_budget(fresh, monkeypatch):
    joined = plan_with(PLAN, padding_free=True, micro_batch_supervised=200)
    others = [
        plan_with(joined, micro_batch_tokens=500, micro_batch_supervised=300),
        plan_with(joined, micro_batch_tokens=900, micro_batch_supervised=500),
    ]
    estimate = fresh()
    first = [estimate(run(), plan) for plan in (PLAN, joined, *others)]
    monkeypatch.setattr(trace, "trace_step", lambda *_, **__: pytest.fail("traced again"))
    again = fresh()
    assert [again(run(), plan) for plan in (PLAN, joined, *others)] == first
    assert [fresh(20 * GIB)(run(), plan).peak_bytes for plan in others] == [m.peak_bytes for m in first[2:]]


def test_a_damaged_file_is_traced_anew(fresh, tmp_path):
    expected = fresh()(run(), PLAN)
    for path in tmp_path.glob("traces/*/*"):
        path.write_bytes(path.read_bytes()[:-100])
    assert fresh()(run(), PLAN) == expected


def test_the_terms_add_up_to_the_peak(estimate):
    first = estimate(run(), PLAN)
    assert (
        first.process_bytes
        >= first.peak_bytes
        == sum(size for name, size in first.terms.items() if name != "context")
    )


def test_with_other_code_everything_is_traced_anew(fresh, monkeypatch, tmp_path):
    fresh()(run(), PLAN)
    before = len(list(tmp_path.glob("traces/*/*")))
    monkeypatch.setattr(step, "SOURCES", (Path(__file__),))
    fresh()(run(), PLAN)
    assert len(list(tmp_path.glob("traces/*/*"))) == 2 * before > 0


def test_target_modules_given_as_a_list_are_a_question_of_their_own(estimate):
    few = run().model_copy(
        update={"tuning": run().tuning.model_validate({"lora": {"target_modules": ["q_proj"]}})}
    )
    assert estimate(few, PLAN).terms["adapters"] < estimate(run(), PLAN).terms["adapters"]


def test_zero2_on_more_gpus_needs_less_for_full_fine_tuning(estimate):
    full = run("full")
    ddp, two, eight = (
        estimate(full, plan_with(PLAN, engine=engine, world_size=world, dtype="float32"))
        for engine, world in (("ddp", 2), ("deepspeed_z2", 2), ("deepspeed_z2", 8))
    )
    assert ddp.terms["optimizer"] > two.terms["optimizer"] > eight.terms["optimizer"]
    assert two.terms["optimizer"] == pytest.approx(4 * eight.terms["optimizer"], rel=1e-4)


def test_zero2_holds_fp32_states_for_16_bit_weights(estimate):
    zero = plan_with(PLAN, engine="deepspeed_z2", world_size=4, dtype="float32")
    terms = estimate(run("full"), zero).terms
    parameters = terms["weights"] // 2
    assert terms["optimizer"] == pytest.approx(12 * parameters / 4, rel=1e-3)


def test_a_change_that_the_model_does_not_allow_has_no_memory():
    estimate = estimator(small_config("mixtral", WIDE), device_budget("cuda", 10 * GIB))
    with pytest.raises(ConfigError, match="fused experts"):
        estimate(run("qlora"), PLAN)


def test_shares_in_steps_are_told_from_those_of_real_micro_batches():
    assert all(is_sampled(steps / SHARES) for steps in range(1, SHARES + 1))
    assert not is_sampled(0.43) and not is_sampled(1 / 3)
