"""W&B, MLflow and trackio, without a network: the groups of their curves, and one run of theirs for each of ours."""

import pytest
from transformers import TrainerState

from sft_play.runlog import RunDir, read_json
from sft_play.train.run import train
from sft_play.train.trackers import grouped, keep_id, kept_id
from tests.conftest import token_rows
from tests.jobs import make_job

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]

SETTINGS = dict(max_steps=4, save_steps=2, eval_steps=2, batch_size=4)


def train_and_resume(tiny_model, folder, tracker: str, between=lambda: None) -> RunDir:
    """A run that is trained to its end, and then again from its second step in other micro-batches."""

    def job(**settings):
        settings = {**SETTINGS, "report_to": [tracker], **settings}
        return make_job(tiny_model, folder, "one", rows=token_rows(100), **settings)

    first = job()
    train(first)
    between()  # what the end of a process does
    train(job(resume=str(first.run.checkpoints / "checkpoint-2"), batch_size=2))
    return first.run


def test_a_resumed_run_is_one_run_of_mlflow_with_our_groups(tiny_model, tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="needs mlflow (pip install mlflow)")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    train_and_resume(tiny_model, tmp_path, "mlflow")
    runs = {path.parts[-4] for path in tmp_path.glob("mlruns/*/*/metrics/*/*")}
    assert len(runs) == 1
    found = {"/".join(path.parts[-2:]) for path in tmp_path.glob("mlruns/*/*/metrics/*/*")}
    assert {"train/loss", "eval/loss", "speed/tokens_per_second", "memory/peak_gib"} <= found
    (losses,) = tmp_path.glob("mlruns/*/*/metrics/train/loss")
    steps = [line.split()[2] for line in losses.read_text().splitlines()]
    assert steps == ["1", "2", "3", "4", "3", "4"]  # MLflow drops nothing


def test_a_resumed_run_is_one_run_of_wandb(tiny_model, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs wandb (pip install wandb)")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    run = train_and_resume(tiny_model, tmp_path, "wandb", wandb.finish)
    parts = list(tmp_path.glob("wandb/offline-run-*"))
    assert {path.name.rpartition("-")[2] for path in parts} == {read_json(run.trackers)["wandb"]}


def test_a_resumed_run_is_one_run_of_trackio_and_a_new_one_is_another(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    trackio = pytest.importorskip("trackio", reason="needs trackio (pip install trackio)")

    def names() -> list[str]:
        return [run.name for run in trackio.Api().runs("huggingface")]

    run = train_and_resume(tiny_model, tmp_path, "trackio")
    assert names() == [read_json(run.trackers)["trackio"]]
    train(make_job(tiny_model, tmp_path, "one", rows=token_rows(100), **SETTINGS, report_to=["trackio"]))
    assert len(set(names())) == 2


def test_a_new_run_has_a_new_id_and_a_resumed_one_keeps_it(tmp_path):
    run, state = RunDir(tmp_path), TrainerState()
    keep_id(run, "wandb", "first")
    keep_id(run, "mlflow", "other")
    assert kept_id(run, "wandb", state) is None
    state.global_step = 2
    assert (kept_id(run, "wandb", state), kept_id(run, "mlflow", state)) == ("first", "other")
    assert kept_id(run, "trackio", state) is None


@pytest.mark.parametrize(
    ("logs", "shown"),
    [
        (
            {"loss": 1.0, "epoch": 0.5, "speed/mfu": 0.4},
            {"train/loss": 1.0, "train/epoch": 0.5, "speed/mfu": 0.4},
        ),
        (
            {"eval_loss": 1.0, "eval_token_accuracy": 0.5, "epoch": 0.5},
            {"eval/loss": 1.0, "eval/token_accuracy": 0.5},
        ),
        (
            {"train_runtime": 1.0, "train_samples_per_second": 3.0, "total_flos": 0.0, "epoch": 1.0},
            {"train/epoch": 1.0},
        ),
    ],
)
def test_each_number_has_a_group(logs, shown):
    assert grouped(logs) == shown
