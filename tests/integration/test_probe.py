"""The probe measures what was predicted, changes nothing, and replans smaller if the prediction was wrong."""

import json
import os
import signal
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from sft_play.builtin.demo import materialise
from sft_play.cache import write_value
from sft_play.config.load import load_config
from sft_play.errors import DoesNotFitError
from sft_play.job import prepare_job
from sft_play.machine.gpus import detect
from sft_play.model.load import load_model_config
from sft_play.planning.planner import every, fastest_plan
from sft_play.planning.request import Request
from sft_play.planning.rows.facts import DataFacts
from sft_play.planning.speed.measured_speed import Timing, read_speed
from sft_play.runlog import read_json
from sft_play.sizing.estimate.budget import LEAST_BYTES
from sft_play.sizing.facts.architecture import Architecture
from sft_play.sizing.meters.product_scratch import product_scratch
from sft_play.train import probe as probing
from sft_play.train.probe import correction_path, largest_micro_batch
from sft_play.train.run import train
from sft_play.train.session import ordered_rows, prepare_session
from sft_play.train.settle import settle_plan
from sft_play.train.speeds import speed_file
from sft_play.units import GIB, KIB
from tests.conftest import token_rows
from tests.integration.cli import make_workspace, sft
from tests.jobs import losses, make_job

ROWS = token_rows(96, longest=64)
# a record of corrections that are too low
TOO_LOW = {"ratios": dict.fromkeys(("forward", "backward", "optimizer", "evaluation"), 0.05)}


def proven(job):
    """The session and the probe result that training would start with."""
    return settle_plan(prepare_session(job))


@pytest.fixture(autouse=True)
def _no_record_of_another_test(tmp_path, make_cache, monkeypatch):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(make_cache(tmp_path / "cache")))


def sized(job, accept=every, **fields):
    """The job with a plan that knows its memory."""
    facts = DataFacts.of(job.data, job.config)
    architecture = Architecture.of(load_model_config(job.config.model))
    return replace(
        job, plan=fastest_plan(Request(job.config, architecture, facts, detect(), 1, **fields), accept)
    )


# Of the long ones, real steps of LoRA and of padded rows are compared in tests/unit/sizing/test_trace.py by default.
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"mode": "lora"}, id="lora", marks=pytest.mark.slow),
        pytest.param({"mode": "full", "gradient_checkpointing": True, "mixed_precision": "bf16"}, id="full"),
        pytest.param(
            {"mode": "qlora", "packing": True, "effective_batch_size": 8 * 64},
            id="packed",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            {"mode": "lora", "padding_free": False, "batch_size": 4}, id="padded", marks=pytest.mark.slow
        ),
    ],
)
def test_the_probe_measures_what_was_predicted(tiny_model, tmp_path, settings):
    """With the real trainer, against the prediction for the very batches that are probed.

    A batch of the evaluation, in NumPy's memory, is not seen by the allocator. Where no rule describes what
    products of 16 bits take, as with AMX, the step may take as much more or less.
    """
    job = sized(make_job(tiny_model, tmp_path, "probe", rows=ROWS, probe=True, **settings))
    session, result = proven(job)
    assert set(result.phases) == {"load", "forward", "backward", "optimizer", "evaluation"}
    rows = probing.step_of_highest(session.rows.dataset, job.plan)
    expected = probing.expected_phases(job.plan, probing.batch_sizes(session, rows))
    rules = product_scratch("bfloat16", 2) if "mixed_precision" in settings else ()
    within = 16 * KIB if all(rule.holds for _, rule in rules) else 128 * KIB
    for phase in ("forward", "backward", "optimizer", "evaluation"):
        assert result.phases[phase] == pytest.approx(expected[phase], abs=within), phase
    assert result.step_seconds > 0 and result.seconds_per_token > 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    "settings", [{"mode": "full"}, {"mode": "lora", "mixed_precision": "bf16"}], ids=["full", "bf16"]
)
def test_a_run_with_a_probe_is_the_run_without_one_bit_for_bit(tiny_model, tmp_path, settings):
    weights, curves = [], []
    for probe in (False, True):
        job = make_job(
            tiny_model, tmp_path, f"probe-{probe}", batch_size=4, probe=probe, weight_decay=0.1, **settings
        )
        torch.manual_seed(5)
        train(job)
        summary = read_json(job.run.summary)
        assert (summary["measured_peak_bytes"] is not None) == probe
        folder = job.run.model if settings["mode"] == "full" else job.run.adapter
        weights.append(load_file(next(folder.glob("*.safetensors"))))
        curves.append(losses(job))
    assert curves[0] == curves[1]
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name


def overconfident(job, share: float):
    """A job planned with a correction that is too low and `share` of the largest plan's peak."""
    whole = sized(job)
    write_value(correction_path(whole, whole.plan), TOO_LOW)
    return sized(job, budget_bytes=int(share * whole.plan.memory.peak_bytes)), whole


@pytest.mark.thorough
def test_over_budget_a_smaller_plan_trains_the_same_effective_batch(tiny_model, tmp_path, capsys):
    settings = dict(rows=ROWS, probe=True, gradient_checkpointing=False)
    job, whole = overconfident(make_job(tiny_model, tmp_path, "wrong", **settings), 0.6)
    assert job.plan.rows.most_tokens == whole.plan.rows.most_tokens  # the record promised that it fits
    train(job)
    summary = read_json(job.run.summary)
    assert summary["micro_batch_tokens"] < job.plan.rows.most_tokens
    assert summary["effective_batch_size"] == job.plan.batch.effective == 16
    assert summary["measured_peak_bytes"] <= job.plan.memory.budget_bytes
    assert "planned again" in capsys.readouterr().out
    assert any("did not fit" in w or "does not fit" in w for w in read_json(job.run.plan)["why"])
    plain = make_job(tiny_model, tmp_path, "plain", **settings, batch_size=summary["micro_batch_size"])
    train(plain)
    assert losses(job) == losses(plain)


@pytest.mark.thorough
def test_where_the_config_leaves_nothing_smaller_the_run_ends_before_it_begins(tiny_model, tmp_path):
    settings = dict(rows=ROWS, probe=True, gradient_checkpointing=False, batch_size=16)
    job, _ = overconfident(make_job(tiny_model, tmp_path, "fixed", **settings), 0.6)
    with pytest.raises(DoesNotFitError, match="the probe measured .* the budget is .*allows no smaller plan"):
        train(job)
    assert not job.run.plan.exists()


@pytest.mark.thorough
def test_search_times_the_alternatives_takes_the_fastest_and_remembers(tiny_model, tmp_path, capsys):
    job = sized(make_job(tiny_model, tmp_path, "search", rows=ROWS, probe="search"))
    assert job.plan.alternatives
    session, result = proven(job)
    tried = capsys.readouterr().out.count("tried micro-batch")
    assert 1 <= tried <= len(job.plan.alternatives)
    assert session.job.plan.batch.effective == job.plan.batch.effective
    assert result.step_seconds > 0
    speed = read_speed(speed_file(session.job))
    assert speed.timed_lately(job.plan, time.time()) and len(speed.rivals) == 1 + tried
    fastest = min(speed.rivals, key=lambda rival: rival.seconds_per_token)
    assert speed.rival(session.job.plan) == fastest  # the next plan knows how fast it was
    assert speed.latest.is_like(fastest)
    assert speed.latest.ratio == pytest.approx(fastest.ratio, rel=1e-4)  # it fades, by the second


@pytest.mark.thorough
def test_a_run_of_some_steps_remembers_how_fast_it_was(tiny_model, tmp_path):
    speeds = []
    for steps in (3, 8):
        job = make_job(tiny_model, tmp_path, f"{steps}-steps", rows=ROWS, max_steps=steps)
        train(job)
        summary = read_json(job.run.summary)
        speeds.append(read_speed(speed_file(job)).latest)
    assert speeds[0] is None and speeds[1].is_like(Timing.of(job.plan, None, 1.0))
    assert speeds[1].seconds_per_token == pytest.approx(1 / summary["tokens_per_second"])


@pytest.mark.thorough
def test_a_short_run_times_no_other_plans(tiny_model, tmp_path, capsys):
    proven(sized(make_job(tiny_model, tmp_path, "short", rows=ROWS, probe=True)))
    assert "tried" not in capsys.readouterr().out


@pytest.mark.parametrize("padding_free", [True, False])
def test_the_largest_micro_batch_is_the_one_that_was_planned_for(tiny_model, tmp_path, padding_free):
    job = make_job(tiny_model, tmp_path, "largest", rows=ROWS, batch_size=4, padding_free=padding_free)
    rows = ordered_rows(job)
    largest = rows.dataset[largest_micro_batch(rows.dataset)]
    assert largest["tokens"] == job.plan.rows.most_tokens == max(rows.dataset["tokens"])


@pytest.mark.slow
def test_two_processes_agree_on_a_smaller_plan(tiny_model, tmp_path):
    """Through `sft-play probe`; every rank measures, the main one plans again, all take its plan."""
    config = make_workspace(tmp_path / "work", tiny_model)
    words = [
        "train.batch_size=auto",
        "train.effective_batch_size=16",
        "train.gradient_checkpointing=false",
        "train.probe=true",
    ]
    words.append("parallel.engine=ddp")
    job = prepare_job(materialise(load_config(config, words)), processes=2, progress=False)
    write_value(correction_path(job, job.plan), TOO_LOW)
    allowed = (LEAST_BYTES + 0.85 * job.plan.memory.peak_bytes) / GIB
    done = sft(
        "probe", "--json", "--processes", "2", "--config", config, *words, f"parallel.memory_gib={allowed}"
    )
    assert done.code == 0, done.err
    found = json.loads(done.out)
    plan = found["plan"]["plan"]
    assert plan["micro_batch_tokens"] < job.plan.rows.most_tokens
    assert plan["effective_batch_size"] == 16 and plan["gradient_accumulation_steps"] > 1
    assert max(found["probe"]["phases"].values()) <= found["plan"]["memory"]["budget_bytes"]


@pytest.mark.slow
def test_search_leaves_out_what_the_first_probe_showed_not_to_fit(tiny_model, tmp_path, capsys):
    """Once the correction is right, the larger plans are no longer candidates, and the run continues."""
    job = make_job(tiny_model, tmp_path, "search", rows=ROWS, probe="search", gradient_checkpointing=False)
    whole = sized(job)
    smallest = sized(job, accept=lambda plan: plan.batch.micro == 2)
    write_value(correction_path(whole, whole.plan), TOO_LOW)
    row = {
        "gradient_accumulation_steps": 1,
        "relative_speed": 1.1,
        "gradient_checkpointing": False,
        "engine": "none",
        "fits": True,
    }
    promised = sized(
        job,
        accept=lambda plan: plan.batch.micro == 2,
        budget_bytes=int(1.2 * smallest.plan.memory.peak_bytes),
    )
    session, result = proven(replace(promised, plan=replace(promised.plan, alternatives=(row,))))
    assert session.job.plan.batch.micro == 2 and result.fits(session.job.plan)
    assert "tried" not in capsys.readouterr().out


class DropsAnInterrupt:
    """Its destructor runs while Ctrl-C arrives, so Python drops the exception that the handler raises."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_in_a_probe_ends_the_run_before_it_begins(tiny_model, tmp_path, monkeypatch):
    job = make_job(tiny_model, tmp_path, "one", probe=True)
    measure = probing._run

    def interrupted(*args):
        DropsAnInterrupt()
        measure(*args)

    monkeypatch.setattr(probing, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(job)
    assert not job.run.plan.exists() and not job.run.metrics.exists()
