"""Losses and gradients that are not finite: the step is skipped, and nothing broken is ever published."""

import itertools
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sft_play.errors import ConfigError, NonFiniteError
from sft_play.launch.accelerate import launch_command, run_launcher
from sft_play.model.build import build_model
from sft_play.runlog import RunDir, read_json, read_metrics
from sft_play.train.run import train
from tests.conftest import token_rows
from tests.jobs import losses, make_job
from tests.rounding import assert_same_values, summed

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]
BROKEN = 7  # a token whose embedding is infinite


@pytest.fixture(scope="module")
def broken_model(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("broken") / "model"
    shutil.copytree(tiny_model, folder)
    weights = load_file(tiny_model / "model.safetensors")
    weights["model.embed_tokens.weight"][BROKEN] = math.inf
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def rows_without(token: int) -> list[dict]:
    rows = token_rows(100)
    return [row | {"input_ids": [9 if each == token else each for each in row["input_ids"]]} for row in rows]


def with_token(rows: list[dict], places: set[int]) -> list[dict]:
    return [
        row | {"input_ids": [BROKEN, *row["input_ids"][1:]]} if place in places else row
        for place, row in enumerate(rows)
    ]


def adapter(job) -> dict[str, torch.Tensor]:
    return load_file(job.run.adapter / "adapter_model.safetensors")


@pytest.mark.thorough
@pytest.mark.parametrize("change", [{"batch_size": 16}, {"batch_size": 4}], ids=["16x1", "4x4"])
def test_a_row_with_an_infinite_loss_costs_its_step_and_is_named(broken_model, tmp_path, capsys, change):
    rows = rows_without(BROKEN)
    settings = dict(rows=rows, val=rows[:21], max_steps=6, **change)
    clean = make_job(broken_model, tmp_path, "clean", **settings)
    train(clean)
    job = make_job(broken_model, tmp_path, "one", **settings | {"rows": with_token(rows, {42})})
    train(job)
    out = " ".join(capsys.readouterr().out.split())
    assert "was skipped: its loss or its gradients are NaN or infinite (1 in a row; 3 end the run)" in out
    assert "not finite by itself: row 42 (" in out
    assert (
        read_json(job.run.summary)["skipped_steps"] == 1
        and read_json(clean.run.summary)["skipped_steps"] == 0
    )
    assert all(torch.isfinite(tensor).all() for tensor in adapter(job).values())
    assert len(losses(job)[0]) == 5 and all(map(math.isfinite, losses(job)[0]))


@pytest.mark.thorough
def test_the_logged_loss_is_the_mean_of_the_other_steps(broken_model, tmp_path):
    rows = rows_without(BROKEN)
    settings = dict(val=rows[:21], max_steps=6, learning_rate=1e-9, batch_size=16)
    each = make_job(broken_model, tmp_path, "each", rows=with_token(rows, {42}), **settings)
    train(each)
    all_six = make_job(
        broken_model, tmp_path, "six", rows=with_token(rows, {42}), logging_steps=6, **settings
    )
    train(all_six)
    assert losses(all_six)[0] == pytest.approx([sum(losses(each)[0]) / 5], rel=1e-5)


@pytest.mark.thorough
def test_three_steps_in_a_row_end_the_run_and_nothing_is_saved(broken_model, tmp_path):
    rows = with_token(rows_without(BROKEN), set(range(100)))
    settings = dict(rows=rows, val=rows_without(BROKEN)[:21], batch_size=4)
    job = make_job(broken_model, tmp_path, "many", **settings)
    with pytest.raises(NonFiniteError, match=r"step 3 was skipped: .*3 in a row.*row \d+ .* more"):
        train(job)
    assert not job.run.adapter.exists() and not list(job.run.checkpoints.glob("checkpoint-*"))


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["lora", "full"])
def test_a_single_gradient_that_is_infinite_costs_its_step(tiny_model, tmp_path, mode):
    job = make_job(tiny_model, tmp_path, mode, mode=mode, batch_size=4)

    calls = itertools.count()

    def break_once(module, inputs, outputs):
        if outputs.requires_grad and next(calls) == 2:
            outputs.register_hook(lambda grad: grad * math.inf)

    def build(*args, **kwargs):
        model = build_model(*args, **kwargs)
        projection = [module for name, module in model.named_modules() if name.endswith("down_proj")][-1]
        projection.register_forward_hook(break_once)
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sft_play.train.session.build_model", build)
        train(job)
    folder = job.run.model if mode == "full" else job.run.adapter
    saved = load_file(next(folder.glob("*.safetensors")))
    assert read_json(job.run.summary)["skipped_steps"] == 1
    assert all(torch.isfinite(tensor).all() for tensor in saved.values())


@pytest.mark.faults
@pytest.mark.parametrize(
    ("engine", "offload"),
    [
        ("ddp", "none"),
        ("deepspeed_z2", "none"),
        ("fsdp2", "none"),
        ("deepspeed_z3", "none"),
        ("deepspeed_z3", "ram"),
    ],
)
def test_two_processes_skip_the_same_step(broken_model, tmp_path, capfd, engine, offload):
    rows = rows_without(BROKEN)
    settings = dict(rows=with_token(rows, {42}), val=rows[:21], max_steps=6, batch_size=4)
    spec = {"model": str(broken_model), "output": str(tmp_path), "name": "two"}
    file = tmp_path / "specs.json"
    file.write_text(json.dumps([spec | {"settings": settings | {"engine": engine, "offload": offload}}]))
    worker = [str(Path(__file__).with_name("worker.py")), str(file)]
    command = launch_command(worker, engine=engine, device="cpu", processes=2, cores=1)
    result = run_launcher(command, RunDir(tmp_path), timeout_s=300)
    assert result.code == 0, result.message
    assert capfd.readouterr().out.count("row 42 (") == 1
    two = RunDir(tmp_path / "two")
    alone = make_job(broken_model, tmp_path, "alone", **settings)
    train(alone)
    assert read_json(two.summary)["skipped_steps"] == 1
    found = [record["train/loss"] for record in read_metrics(two) if "train/loss" in record]
    # after a step that DeepSpeed skips, the learning rate is that of the step before
    close = 5e-4 if "deepspeed" in engine else summed(16 * 60)  # 16 rows of up to 60 tokens in a step
    assert_same_values(found, losses(alone)[0], close)
    assert len(found) == 5


@pytest.mark.thorough
def test_an_infinite_validation_loss_is_told_and_is_neither_best_nor_impatient(
    broken_model, tmp_path, capsys
):
    rows = rows_without(BROKEN)
    settings = dict(rows=rows, val=with_token(rows[:21], {3}), batch_size=4, eval_steps=1, save_steps=1)
    job = make_job(broken_model, tmp_path, "one", **settings, early_stopping_patience=1)
    train(job)
    summary = read_json(job.run.summary)
    assert summary["optimizer_steps"] == 5 and summary["best_checkpoint"] is None
    assert losses(job)[1] == [None] * 6 and summary["eval"]["after"]["loss"] is None
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("counts neither for the best checkpoint nor for early stopping") == 6


def test_full_fine_tuning_of_a_broken_base_is_refused_and_the_weight_named(broken_model, tmp_path):
    job = make_job(broken_model, tmp_path, "one", rows=rows_without(BROKEN), mode="full")
    with pytest.raises(ConfigError, match="the weight model.embed_tokens.weight of .* is NaN or infinite"):
        train(job)
    assert not job.run.metrics.exists() and not job.run.model.exists()
