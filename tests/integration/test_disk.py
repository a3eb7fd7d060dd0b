"""A disk that is full, read-only or gone, while a run trains and after it."""

import shutil
import subprocess
from collections import namedtuple
from contextlib import contextmanager

import pytest

from sft_play.errors import StorageError
from sft_play.train.callbacks import Reporter
from sft_play.train.run import train
from tests.conftest import file_size_limit
from tests.integration.cli import sft
from tests.jobs import losses, make_job

pytestmark = pytest.mark.integration
Usage = namedtuple("Usage", "total used free")


def mount(*words) -> bool:
    return subprocess.run(["mount", *map(str, words)], capture_output=True).returncode == 0


@contextmanager
def small_disk(folder, size="16m"):
    """A disk of its own at `folder`; skips the test where nothing may be mounted."""
    folder.mkdir(exist_ok=True)
    if shutil.which("mount") is None or not mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder):
        pytest.skip("only root may mount a disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def at_step(number, action, monkeypatch):
    """Calls `action` when a step ends, before its record is written."""
    ended = Reporter.on_step_end

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == number:
            action()
        ended(self, args, state, control, **kwargs)

    monkeypatch.setattr(Reporter, "on_step_end", on_step_end)


# The weights of the tiny model are 430 kB, its optimizer state twice that: safetensors' error, then
# torch.save's.
@pytest.mark.thorough
@pytest.mark.parametrize("limit", [200_000, 600_000], ids=["weights", "optimizer"])
def test_a_full_disk_is_told_in_words_and_the_run_can_go_on(tiny_model, tmp_path, limit):
    settings = dict(mode="full", batch_size=16, save_steps=2, eval_steps=2, max_steps=4)
    whole = make_job(tiny_model, tmp_path, "whole", **settings)
    train(whole)
    job = make_job(tiny_model, tmp_path, "full-disk", **settings)
    with (
        file_size_limit(limit),
        pytest.raises(StorageError, match="cannot write to .*full-disk: .*make resume"),
    ):
        train(job)
    resumed = make_job(tiny_model, tmp_path, "full-disk", **settings, resume="auto")
    train(resumed)
    assert losses(resumed) == losses(whole)


@pytest.mark.thorough
def test_a_run_directory_that_is_removed_while_training_is_one_sentence(tiny_model, tmp_path, monkeypatch):
    job = make_job(tiny_model, tmp_path, "gone", batch_size=4)
    at_step(2, lambda: shutil.rmtree(job.run.path), monkeypatch)
    with pytest.raises(StorageError, match="the run directory .*gone was removed"):
        train(job)


@pytest.mark.thorough
@pytest.mark.parametrize("settings", [{}, {"logging_steps": 100, "eval_steps": 3, "save_steps": 3}])
def test_a_disk_that_becomes_read_only_while_training_is_one_sentence(
    tiny_model, tmp_path, monkeypatch, settings
):
    with small_disk(tmp_path / "disk") as disk:
        job = make_job(tiny_model, disk, "one", batch_size=4, **settings)
        at_step(2, lambda: mount("-o", "remount,ro", disk), monkeypatch)
        with pytest.raises(StorageError, match="cannot write to .*one: Read-only file system"):
            train(job)


@pytest.mark.thorough
@pytest.mark.parametrize("command", ["eval", "infer", "merge"])
def test_a_finished_run_on_a_read_only_disk_is_one_sentence(finished, tmp_path, command):
    with small_disk(tmp_path / "disk") as disk:
        shutil.copytree(finished.run.path, disk / "one")
        mount("-o", "remount,ro", disk)
        done = sft(command, "--config", finished.config, f"output.dir={disk}")
    assert done.code == 6 and done.err.startswith("error: ") and len(done.err.splitlines()) == 1, done.err
    assert "cannot write" in done.err and "log.txt: Read-only file system" in done.err


@pytest.mark.thorough
@pytest.mark.parametrize("size", [100, 400, 424, 440])
def test_a_merge_onto_a_full_disk_leaves_nothing(finished, tmp_path, monkeypatch, size):
    """Also if the disk fills up only after its free space was looked at."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(10**9, 0, 10**9))
    with small_disk(tmp_path / "disk", f"{size}k") as disk:
        done = sft("merge", "--config", finished.config, "--output", disk / "merged")
        assert done.code == 6 and "merged" in done.err and "OUT=<folder>" in done.err, done.err
        assert list(disk.iterdir()) == []
