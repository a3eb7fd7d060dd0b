"""Plans that are left out without a trace are plans that a trace would have left out."""

import re
from dataclasses import replace

import pytest

from benchmarks.small_models import WIDE, small_config
from sft_play.choices.optimizers import OPTIMIZERS
from sft_play.config.schema import RunConfig
from sft_play.machine.gpus import what_if
from sft_play.planning.allowed import allowed_plans, estimator_of, leanest_memories
from sft_play.planning.candidates.drafts import leanest
from sft_play.planning.candidates.weights_alone import held_bytes, not_too_large
from sft_play.planning.request import Request
from sft_play.sizing.facts.architecture import Architecture
from tests.unit.planning.test_planner import FACTS

MODEL = Architecture.of(small_config("llama", WIDE))
MACHINE = what_if("RTX 4090", 16)


def run(mode: str, engine: str = "auto", dtype: str = "auto", **train) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"name": "m", "dtype": dtype},
            "data": {"train_path": "x"},
            "tuning": {"mode": mode},
            "train": {"effective_batch_size": 16, "gradient_checkpointing": True, **train},
            "parallel": {"engine": engine, "offload": "none"},
        }
    )


def request(config: RunConfig) -> Request:
    return Request(config, MODEL, FACTS, MACHINE, 16, machines=2)


def drafts(config: RunConfig):
    return leanest(allowed_plans(request(config))[0])


def assert_left_out_by_less_than_it_takes(config: RunConfig) -> None:
    """Also not by one byte."""
    estimate = estimator_of(request(config))
    for plan in drafts(config):
        terms = estimate(config, plan).phase_terms["optimizer"]
        held = held_bytes(config, MODEL, plan)
        assert 0 < held <= sum(terms[name] for name in ("weights", "gradients", "optimizer"))
        assert plan in not_too_large(config, MODEL, [plan, *drafts(run("qlora", "deepspeed_z3"))], held)[0]


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["full", pytest.param("lora", marks=pytest.mark.slow), "qlora"])
def test_what_is_left_out_would_not_have_fit(mode):
    assert_left_out_by_less_than_it_takes(run(mode))


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", [name for name, row in OPTIMIZERS.items() if row.package != "schedulefree"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_so_with_each_optimizer_and_type_of_weights(optimizer, dtype):
    for engine in ("auto", *(["deepspeed_z3"] if optimizer == "adamw" else [])):
        assert_left_out_by_less_than_it_takes(run("full", engine, dtype, optimizer=optimizer))


def test_those_that_hold_least_stay_whatever_the_budget():
    every = drafts(run("full"))
    assert len({(plan.sharing.engine, plan.sharing.replicas) for plan in every}) == 4
    kept, why = not_too_large(run("full"), MODEL, every, 0)
    assert {(plan.sharing.engine, plan.sharing.replicas) for plan in kept} == {("fsdp2", 1)}
    assert re.fullmatch("DDP, ZeRO-2, FSDP2 hybrid ruled out: the weights alone need at least .*", *why)
    asked = drafts(run("full", "ddp"))
    assert not_too_large(run("full", "ddp"), MODEL, asked, 0) == (asked, [])


def test_weights_that_have_room_without_gradients_and_states_are_no_reason_to_trace():
    every = drafts(run("full"))
    of_ddp = next(held_bytes(run("full"), MODEL, plan) for plan in every if plan.sharing.engine == "ddp")
    kept, why = not_too_large(run("full"), MODEL, every, of_ddp - 1)
    assert {plan.sharing.engine for plan in kept} == {"deepspeed_z2", "fsdp2"}
    assert re.fullmatch("DDP ruled out: weights, gradients and optimizer states alone need .*", *why)
    assert not list(leanest_memories(replace(request(run("full")), budget_bytes=1)))
