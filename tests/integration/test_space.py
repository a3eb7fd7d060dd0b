"""A disk that has no room for what a run is about to save."""

import errno
import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from sft_play.errors import StorageError
from sft_play.train import disk
from sft_play.train.checkpoints import by_step, step_of
from sft_play.train.run import train
from sft_play.train.session import prepare_session
from sft_play.train.trainer import PlannedTrainer
from tests.conftest import file_size_limit
from tests.jobs import losses, make_job

pytestmark = pytest.mark.integration
SAVING = dict(mode="full", batch_size=16, save_steps=1, eval_steps=1, max_steps=6, keep_checkpoints=6)


@pytest.fixture
def disk_is_full(monkeypatch):
    """`disk_is_full(*steps)`: there is no room at the ends of these steps."""
    free = disk.free_bytes

    def fill(*steps):
        def free_now(folder):
            asked.append(1)
            return 1000 if len(asked) - 1 in steps else free(folder)

        asked = []  # once before the first step, then at the end of each
        monkeypatch.setattr(disk, "free_bytes", free_now)

    return fill


def saved_steps(job) -> set:
    return {step_of(path) for path in by_step(job.run)}


@pytest.mark.thorough
def test_a_save_for_which_there_is_no_room_is_left_out_and_the_run_goes_on(
    tiny_model, tmp_path, disk_is_full, capsys
):
    whole = make_job(tiny_model, tmp_path, "whole", **SAVING)
    train(whole)
    job = make_job(tiny_model, tmp_path, "one", **SAVING)
    disk_is_full(3, 6)  # the last one too: then the result follows
    train(job)
    assert saved_steps(job) == {1, 2, 4, 5} and losses(job) == losses(whole)
    assert (job.run.model / "model.safetensors").exists()
    out = " ".join(capsys.readouterr().out.split())
    assert "step 3: no checkpoint, since it needs" in out and "free space before the next one" in out


@pytest.mark.faults
def test_two_saves_in_a_row_without_room_end_the_run_and_it_can_go_on(tiny_model, tmp_path, disk_is_full):
    whole = make_job(tiny_model, tmp_path, "whole", **SAVING)
    train(whole)
    job = make_job(tiny_model, tmp_path, "one", **SAVING)
    disk_is_full(3, 4)
    with pytest.raises(StorageError, match="step 4: no checkpoint, since it needs .*make resume"):
        train(job)
    assert saved_steps(job) == {1, 2}
    resumed = make_job(tiny_model, tmp_path, "one", **SAVING, resume="auto")
    train(resumed)
    assert losses(resumed) == losses(whole)


@pytest.mark.parametrize("moment", [0, 1], ids=["before the start", "the first save"])
def test_without_a_checkpoint_to_go_back_to_a_full_disk_ends_the_run_at_once(
    tiny_model, tmp_path, disk_is_full, moment
):
    job = make_job(tiny_model, tmp_path, "one", **SAVING)
    disk_is_full(moment)
    said = "Free space, and start again, as there is no checkpoint: make resume" if moment else "need"
    with pytest.raises(StorageError, match=said):
        train(job)
    assert job.run.plan.exists() == bool(moment) and not saved_steps(job)


@pytest.mark.parametrize("mode", ["full", pytest.param("lora", marks=pytest.mark.faults)])
def test_the_size_of_the_first_checkpoint_is_known_before_it_is_written(tiny_model, tmp_path, mode):
    job = make_job(tiny_model, tmp_path, "one", **SAVING | {"mode": mode})
    expected = disk.checkpoint_bytes(prepare_session(job))
    train(job)
    found = disk.size_of(by_step(job.run)[-1])
    assert expected < found < disk.MARGIN * expected + 200_000  # tokenizer, state of the trainer


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("failing", "saved"),
    [([3], {1, 2, 4, 5, 6}), pytest.param([3, 4], {1, 2}, marks=pytest.mark.faults)],
    ids=["once", "twice"],
)
def test_a_save_that_fails_half_way_is_left_out_too(tiny_model, tmp_path, monkeypatch, failing, saved):
    """The weights fit below the limit, the optimizer's state does not."""
    whole = make_job(tiny_model, tmp_path, "whole", **SAVING)
    train(whole)
    write = PlannedTrainer._save_optimizer_and_scheduler

    def write_below_limit(self, folder):
        with file_size_limit(600_000) if self.state.global_step in failing else nullcontext():
            write(self, folder)

    monkeypatch.setattr(PlannedTrainer, "_save_optimizer_and_scheduler", write_below_limit)
    job = make_job(tiny_model, tmp_path, "one", **SAVING)
    if len(failing) == 1:
        train(job)
        assert losses(job) == losses(whole)
    else:
        with pytest.raises(StorageError, match="step 4: no checkpoint, since .*one cannot be written"):
            train(job)
    assert saved_steps(job) == saved and not list(job.run.checkpoints.glob("incomplete/*"))


@pytest.mark.faults
@pytest.mark.parametrize("number", [errno.EIO, errno.EXDEV])
def test_a_checkpoint_that_cannot_be_renamed_is_left_out_and_the_run_goes_on(
    tiny_model, tmp_path, monkeypatch, capsys, number
):
    rename = Path.rename

    def refuse(self, target):
        if self.parent.name == "incomplete" and self.name == "checkpoint-3":
            raise OSError(number, os.strerror(number), str(self), None, str(target))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    job = make_job(tiny_model, tmp_path, "one", **SAVING)
    train(job)
    assert saved_steps(job) == {1, 2, 4, 5, 6} and not list(job.run.checkpoints.glob("incomplete/*"))
    assert f"cannot be written: {os.strerror(number)}" in " ".join(capsys.readouterr().out.split())
