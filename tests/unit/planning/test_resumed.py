"""A run that goes on is planned as it began."""

import json

import numpy as np
import pytest
from transformers import LlamaConfig

from sft_play.config.schema import RunConfig
from sft_play.machine.gpus import what_if
from sft_play.planning.answers.resumed import earlier_plan, resumed_plan
from sft_play.planning.budget import training_device
from sft_play.planning.planner import fastest_plan
from sft_play.planning.request import Request
from sft_play.planning.rows.facts import DataFacts
from sft_play.sizing.estimate.corrections import record_path, write_ran_out
from sft_play.sizing.facts.architecture import Architecture
from tests.plans import plan_with

LLAMA = Architecture.of(
    LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    )
)
LENGTHS = np.array([40, 24, 33, 8] * 16)
FACTS = DataFacts(LENGTHS, LENGTHS - 1, 40, float(LENGTHS.mean()), float((LENGTHS**2).mean()), seed=0)
MACHINE = what_if("RTX 4090", 2)


def config(engine: str = "ddp", **train) -> RunConfig:
    ways = {"engine": engine, "offload": "none"}  # few steps to trace
    tree = {"model": {"name": "a"}, "data": {"train_path": "b"}, "parallel": ways}
    return RunConfig.model_validate({**tree, "train": {"effective_batch_size": 16, **train}})


def request(run: RunConfig) -> Request:
    return Request(run, LLAMA, FACTS, MACHINE, 2)


@pytest.fixture(scope="module")
def freely():
    """The plan that is chosen without an earlier one."""
    return fastest_plan(request(config()))


@pytest.mark.thorough
def test_the_micro_batch_and_the_ways_to_send_less_are_those_of_the_earlier_plan():
    kept = {"gradient_checkpointing": False}
    began = fastest_plan(request(config("fsdp2", batch_size=2, **kept)))
    began = plan_with(began, defers_exchange=not began.sharing.defers_exchange)
    freely = fastest_plan(request(config("fsdp2", **kept)))
    assert began.batch.micro != freely.batch.micro
    plan = resumed_plan(request(config("fsdp2", **kept)), began)
    assert (plan.batch, plan.sharing) == (began.batch, began.sharing) and plan.memory.fits


@pytest.mark.parametrize(
    ("run", "changes"),
    [
        (config(), {"world_size": 4}),
        (config("fsdp2"), {}),
        (config(), {"dtype": "float16"}),
    ],
)
def test_another_number_of_processes_engine_or_type_is_planned_anew(freely, run, changes):
    assert resumed_plan(request(run), plan_with(freely, **changes)) is None


def test_what_the_config_says_now_comes_first(freely):
    """A plan with another micro-batch than that of the config is not the one with which the run goes on."""
    assert resumed_plan(request(config(batch_size=1)), freely) is None


def test_a_plan_with_which_memory_has_run_out_is_not_taken_again(freely):
    run = config(batch_size=4)
    began = fastest_plan(request(run))
    assert resumed_plan(request(run), began)
    write_ran_out(record_path(LLAMA.text, training_device(MACHINE).name, run, began), began)
    assert resumed_plan(request(run), began) is None


def test_the_plan_is_that_of_the_run_or_of_the_checkpoint(freely, tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    (run / "plan.json").write_text(json.dumps(freely.to_json()))
    assert earlier_plan(config(resume="auto"), run) == freely
    assert earlier_plan(config(resume=str(run / "checkpoints" / "checkpoint-5")), other) == freely
    assert earlier_plan(config(resume="auto"), other) is None
    assert earlier_plan(config(), run) is None
    (run / "plan.json").write_text('{"plan": {}}')
    assert earlier_plan(config(resume="auto"), run) is None
