"""Memory that runs out in the middle of a run: a smaller plan goes on, and the result is the same."""

import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sft_play.commands.train import MOST_RECOVERIES, train_job
from sft_play.errors import OutOfMemory
from sft_play.job import takes_less
from sft_play.launch import accelerate
from sft_play.model.build import build_model
from sft_play.plan import Plan
from sft_play.runlog import RunDir, read_json, read_metrics
from sft_play.train.checkpoints import by_step
from sft_play.train.rows import validation_rows
from sft_play.train.run import train
from tests.integration.cli import make_workspace, sft
from tests.integration.memory_faults import failing, failing_optimizer
from tests.jobs import losses, make_job

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]
PACKED = {"mode": "lora", "packing": True, "effective_batch_size": 8 * 64, "batch_size": 2 * 64}
KEPT = {"batch_size": 4, "gradient_checkpointing": False, "save_steps": 2, "eval_steps": 2, "max_steps": 6}
BUILD = "sft_play.train.session.build_model"
SECONDS = 300  # far more than two launches take, and less than the limit for a collective operation


@pytest.fixture
def fault(monkeypatch):
    """`fault(where, *passes)`: memory runs out in these passes of the sessions that follow."""
    return lambda where, *passes: monkeypatch.setattr(BUILD, failing(build_model, where, set(passes)))


@pytest.fixture
def optimizer_fault():
    """`optimizer_fault(*updates)`: memory runs out in these updates of the weights."""
    handles = []
    yield lambda *updates: handles.append(failing_optimizer(set(updates)))
    for handle in handles:
        handle.remove()


def weights(job) -> dict[str, torch.Tensor]:
    folder = job.run.model if job.config.tuning.mode == "full" else job.run.adapter
    return load_file(next(folder.glob("*.safetensors")))


def assert_same_result(job, clean) -> None:
    for found, expected in zip(losses(job), losses(clean), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    for name, expected in weights(clean).items():
        torch.testing.assert_close(weights(job)[name], expected, rtol=1e-4, atol=1e-5)


def goes_on_as_if_nothing_had_happened(model: Path, folder: Path, fail, **settings) -> list[str]:
    """Trains without and with the fault that `fail()` injects; returns what was said about it."""
    settings = KEPT | settings
    clean = make_job(model, folder, "clean", **settings)
    train(clean)
    before = read_json(clean.run.summary)
    assert before["out_of_memory"] == []
    fail()
    job = make_job(model, folder, "one", **settings)
    train_job(job)
    summary = read_json(job.run.summary)
    assert_same_result(job, clean)
    assert summary["effective_batch_size"] == before["effective_batch_size"]
    plan = Plan.from_json(read_json(job.run.plan))
    assert plan.batch.micro == summary["micro_batch_size"]
    assert takes_less(job.plan)(plan)
    assert not list(folder.glob("one.*"))
    return summary["out_of_memory"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("where", "settings"),
    [
        ("forward", {"mode": "lora"}),
        pytest.param("backward", {"mode": "full", "padding_free": False}, marks=pytest.mark.faults),
        pytest.param("backward", PACKED, marks=pytest.mark.faults),
    ],
    ids=["forward", "backward-padded", "backward-packed"],
)
def test_a_smaller_plan_goes_on_from_the_last_checkpoint(
    tiny_model, tmp_path, fault, capsys, where, settings
):
    third_of_step_4 = 3 * 4 + 2  # of four micro-batches; step 2 was saved
    [said] = goes_on_as_if_nothing_had_happened(
        tiny_model, tmp_path, lambda: fault(where, third_of_step_4), **settings
    )
    assert "after 3 steps, memory ran out at micro-batch" in said
    assert "continuing from the last checkpoint with a smaller plan" in said
    assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.thorough
def test_without_a_checkpoint_it_begins_at_the_start(tiny_model, tmp_path, fault):
    [said] = goes_on_as_if_nothing_had_happened(tiny_model, tmp_path, lambda: fault("backward", 4 + 1))
    assert "after 1 step, " in said and "continuing from the beginning, without a checkpoint" in said


@pytest.mark.faults
def test_in_the_update_too(tiny_model, tmp_path, optimizer_fault):
    [said] = goes_on_as_if_nothing_had_happened(tiny_model, tmp_path, lambda: optimizer_fault(3))
    assert "after 3 steps, " in said


@pytest.mark.faults
@pytest.mark.parametrize("evaluated", ["auto", 7])
@pytest.mark.parametrize(("earlier", "start"), [(0, "the beginning"), (2, "the last checkpoint")])
def test_in_an_evaluation_too(tiny_model, tmp_path, fault, earlier, start, evaluated):
    """Also if the config says how many rows its batches have."""
    settings = {"batch_size": 16, "evaluated": evaluated}
    batches = validation_rows(make_job(tiny_model, tmp_path, "one", **KEPT | settings))
    number = earlier * len(batches.dataset)  # the first batch after so many evaluations
    [said] = goes_on_as_if_nothing_had_happened(
        tiny_model, tmp_path, lambda: fault("evaluation", number), **settings
    )
    assert f"continuing from {start}" in said


@pytest.mark.faults
def test_memory_may_run_out_again_and_each_plan_is_smaller(tiny_model, tmp_path, fault):
    said = goes_on_as_if_nothing_had_happened(
        tiny_model, tmp_path, lambda: fault("backward", 2, 4, 9), batch_size=16, gradient_checkpointing=True
    )
    sizes = [int(line.split("at micro-batch ")[1].split(":")[0]) for line in said]
    assert len(sizes) == 3 and sizes == sorted(set(sizes), reverse=True)


@pytest.mark.thorough
def test_it_does_not_begin_again_for_ever(tiny_model, tmp_path, fault):
    fault("forward", *range(1000))
    job = make_job(tiny_model, tmp_path, "one", **KEPT | {"batch_size": 16})
    began = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sft_play.commands.train.train_here", lambda job: (began.append(job.plan), train(job)))
        with pytest.raises(OutOfMemory, match="after 0 steps, memory ran out at micro-batch") as ended:
            train_job(job)
    assert len(began) == 1 + MOST_RECOVERIES and ended.value.exit_code == 4
    tokens = [(plan.rows.most_tokens, not plan.activations.recomputes) for plan in began]
    assert tokens == sorted(set(tokens), reverse=True)


@pytest.mark.thorough
def test_a_single_row_that_does_not_fit_ends_the_run(tiny_model, tmp_path, fault):
    fault("forward", 16 + 2)  # the third row of step 2
    job = make_job(tiny_model, tmp_path, "one", batch_size=1, gradient_checkpointing=True)
    with pytest.raises(
        OutOfMemory, match="after 1 step, memory ran out at micro-batch 1: CUDA out of memory"
    ) as ended:
        train_job(job)
    assert "no smaller plan to continue with" in str(ended.value) and ended.value.exit_code == 4


@pytest.mark.faults
def test_a_single_row_that_does_not_fit_goes_on_with_activations_recomputed(
    tiny_model, tmp_path, fault, capsys
):
    settings = dict(batch_size=1, save_steps=2, eval_steps=2, max_steps=4)
    clean = make_job(tiny_model, tmp_path, "clean", **settings)
    assert not clean.plan.activations.recomputes
    train(clean)
    fault("forward", 2 * 16 + 5)  # a row of step 3
    job = make_job(tiny_model, tmp_path, "one", **settings)
    train_job(job)
    summary = read_json(job.run.summary)
    assert_same_result(job, clean)
    plan = Plan.from_json(read_json(job.run.plan))
    assert plan.activations.recomputes
    assert (plan.batch.micro, plan.batch.accumulation) == (1, 16)
    assert "continuing from the last checkpoint" in summary["out_of_memory"][0]
    assert "activations recomputed" in " ".join(capsys.readouterr().out.split())


# --- two ranks
# ---------------------------------------------------------------------------------------------------------

FAULTY_RANK = """\
import os, sys, time
from pathlib import Path
sys.path.insert(0, {repository!r})
from sft_play.machine.process import die_with_parent
die_with_parent()
from sft_play.cli import run_rank
from sft_play.train import session
from tests.integration.memory_faults import failing, failing_optimizer
once = Path({once!r})
if os.environ["RANK"] == "1" and not once.exists():
    once.touch()
    if {where!r} == "update":
        failing_optimizer({{{number}}})
    else:
        session.build_model = failing(session.build_model, {where!r}, {{{number}}})
raise SystemExit(run_rank(sys.argv[1:]))
"""


def curves(run: RunDir) -> dict[int, list[float]]:
    """Training and evaluation losses by step."""
    found: dict[int, list[float]] = {}
    for record in read_metrics(run):
        found.setdefault(record["step"], []).append(record.get("train/loss", record.get("eval/loss")))
    return found


@pytest.mark.faults
@pytest.mark.parametrize("engine", ["ddp", "deepspeed_z2", "fsdp2", "deepspeed_z3"])
@pytest.mark.parametrize(
    ("where", "number", "start"),
    [
        ("forward", 5, "the last checkpoint"),
        ("backward", 2, "the beginning"),
        ("update", 5, "the last checkpoint"),
        ("evaluation", 2, "the last checkpoint"),  # the one after the last step
    ],
)
def test_one_rank_of_two_ends_both_within_seconds_and_a_smaller_plan_goes_on(
    tiny_model, tmp_path, monkeypatch, engine, where, number, start
):
    """Step 5 was saved; the other rank would wait for ten minutes."""
    config = make_workspace(tmp_path, tiny_model)
    words = [f"parallel.engine={engine}", "eval.generate=false", "train.save_steps=5", "train.eval_steps=5"]
    words += ["train.gradient_checkpointing=false", "train.probe=false", "train.report_to=[]"]
    words += ["parallel.timeout_s=600", "--processes", "2"]
    clean = sft("train", "--config", config, *words, "output.name=clean")
    assert clean.code == 0, clean.err
    script = tmp_path / "faulty_rank.py"
    repository = str(Path(__file__).resolve().parents[2])
    script.write_text(
        FAULTY_RANK.format(repository=repository, once=str(tmp_path / "once"), where=where, number=number)
    )
    monkeypatch.setattr(accelerate, "SCRIPT", script)
    began = time.monotonic()
    done = sft("train", "--config", config, *words)
    assert done.code == 0, done.err
    assert time.monotonic() - began < SECONDS
    one, expected = RunDir(tmp_path / "runs" / "one"), RunDir(tmp_path / "runs" / "clean")
    summary = read_json(one.summary)
    [said] = summary["out_of_memory"]
    assert f"continuing from {start}" in said
    assert summary["effective_batch_size"] == 8 and summary["micro_batch_size"] < 4
    assert [path.name for path in by_step(one)] == [path.name for path in by_step(expected)]
    assert curves(one) == {step: pytest.approx(values, rel=1e-5) for step, values in curves(expected).items()}
