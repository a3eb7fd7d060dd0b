"""Two processes time other plans, agree on the fastest, train it, and start with it the next time."""

import pytest

from sft_play.launch import accelerate
from sft_play.machine.gpus import detect
from sft_play.planning.speed.devices import device_name, read_collectives
from sft_play.runlog import RunDir, read_json
from tests.conftest import REPOSITORY
from tests.integration.cli import make_workspace, sft
from tests.integration.test_distributed import assert_same_result

pytestmark = [pytest.mark.integration, pytest.mark.slow]
FASTEST = 2  # accumulation; the prediction prefers 1
WORDS = ("train.batch_size=auto", "train.probe=search", "eval.generate=false")


@pytest.fixture
def train(tiny_model, tmp_path, monkeypatch):
    """`train(name, *words)` trains with our own ranks; returns the run directory and what was said."""
    config = make_workspace(tmp_path / "work", tiny_model)
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("FASTEST", str(FASTEST))
    monkeypatch.setattr(accelerate, "SCRIPT", REPOSITORY / "tests" / "integration" / "timed_rank.py")

    def run(name, *words):
        done = sft("train", "--config", config, f"output.name={name}", *words)
        return RunDir(config.parent / "runs" / name), done

    return run


@pytest.mark.parametrize("engine", ["ddp", "deepspeed_z2"])
def test_the_fastest_of_the_timed_plans_is_trained_and_remembered(train, engine):
    together = ("--processes", "2", "--engine", engine, *WORDS)
    first, said = train("first", *together)
    assert said.code == 0, said.err
    assert "all-reduce of" in said.out and 2 in read_collectives(device_name(detect()))
    assert said.out.count("tried micro-batch") >= 2
    assert read_json(first.summary)["gradient_accumulation_steps"] == FASTEST
    again, said = train("again", *together)
    assert said.code == 0 and "tried micro-batch" not in said.out, said.out
    assert "all-reduce of" not in said.out and "as measured between 2 processes" in said.out
    assert read_json(again.summary)["gradient_accumulation_steps"] == FASTEST
    alone, said = train("alone", "--processes", "1", "train.probe=false", "eval.generate=false")
    assert said.code == 0, said.err
    for run in (first, again):
        assert_same_result(run, alone)


def test_a_plan_that_runs_out_of_memory_while_it_is_timed_is_not_tried_again(train, monkeypatch):
    together = ("--processes", "2", "--engine", "ddp", *WORDS)
    monkeypatch.setenv("FAULT", f"memory@{FASTEST}")
    run, said = train("faulty", *together)
    assert said.code == 4 and "memory ran out in the probe of micro-batch" in said.err, said.err
    assert not run.plan.exists() and not run.adapter.exists()
    monkeypatch.delenv("FAULT")
    run, said = train("faulty", *together)
    assert said.code == 0 and "tried micro-batch 2, activations kept" not in said.out, said.err
    plan = read_json(run.plan)["plan"]
    assert plan["effective_batch_size"] == 8
    assert (plan["gradient_accumulation_steps"], plan["gradient_checkpointing"]) != (FASTEST, False)


def test_a_rank_that_is_killed_while_another_plan_is_timed_ends_the_run_and_is_named(train, monkeypatch):
    monkeypatch.setenv("FAULT", f"kill@{FASTEST}")
    run, said = train("faulty", "--processes", "2", "--engine", "ddp", *WORDS)
    assert said.code == 9 and "rank 1 died without reporting an error: killed by SIGKILL" in said.err, (
        said.err
    )
    assert not run.plan.exists() and not run.adapter.exists()
