"""Plans that are left out without a trace are plans that a trace would have left out."""

import pytest

from benchmarks.small_models import WIDE, small_config
from sft_play.config.schema import RunConfig
from sft_play.machine.gpus import what_if
from sft_play.planning.allowed import allowed_plans, estimator_of
from sft_play.planning.candidates.drafts import leanest
from sft_play.planning.candidates.weights_alone import not_too_large
from sft_play.planning.request import Request
from sft_play.reasons.choices import WeightsAlone
from sft_play.sizing.facts.architecture import Architecture
from tests.unit.planning.test_planner import FACTS

MODEL = Architecture.of(small_config("llama", WIDE))
MACHINE = what_if("RTX 4090", 16)


def run(mode: str, engine: str = "auto") -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"name": "m"},
            "data": {"train_path": "x"},
            "tuning": {"mode": mode},
            "train": {"effective_batch_size": 16, "gradient_checkpointing": True},
            "parallel": {"engine": engine, "offload": "none"},
        }
    )


def request(config: RunConfig) -> Request:
    return Request(config, MODEL, FACTS, MACHINE, 16, machines=2)


def drafts(config: RunConfig):
    return leanest(allowed_plans(request(config))[0])


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["full", pytest.param("lora", marks=pytest.mark.slow), "qlora"])
def test_what_is_left_out_would_not_have_fit(mode):
    """Also not by one byte: what counts for a plan is never more than the weights that it holds throughout."""
    config = run(mode)
    estimate = estimator_of(request(config))
    for plan in drafts(config):
        held = min(terms["weights"] for terms in estimate(config, plan).phase_terms.values())
        kept, why = not_too_large(config, MODEL, [plan, *drafts(run(mode, "deepspeed_z3"))], held)
        assert plan in kept and not why


def test_those_that_hold_least_stay_whatever_the_budget():
    every = drafts(run("full"))
    assert len({(plan.sharing.engine, plan.sharing.replicas) for plan in every}) == 4
    kept, why = not_too_large(run("full"), MODEL, every, 0)
    assert {(plan.sharing.engine, plan.sharing.replicas) for plan in kept} == {("fsdp2", 1)}
    assert [type(reason) for reason in why] == [WeightsAlone]
    assert why[0].engines == "DDP, ZeRO-2, FSDP2 hybrid"
    asked = drafts(run("full", "ddp"))
    assert not_too_large(run("full", "ddp"), MODEL, asked, 0) == (asked, [])
