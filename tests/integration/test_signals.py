"""Signals to a real command: a terminal that is closed, `nohup`, and what is said when a run ends at once."""

import os
import pty
import signal
import subprocess
import sys
import time

import psutil
import pytest

from sft_play.runlog import RunDir, read_json
from tests.integration.cli import environment, finish, make_workspace, signal_at_step, start
from tests.integration.test_cli import assert_interrupted

pytestmark = [pytest.mark.integration, pytest.mark.faults]

LONG = ("train.max_steps=400", "train.batch_size=1", "train.effective_batch_size=2", "eval.generate=false")
ON_TERMINAL = (
    "import fcntl, os, sys, termios\n"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


@pytest.fixture
def config(tiny_model, tmp_path):
    return make_workspace(tmp_path, tiny_model)


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_terminal_that_is_closed_ends_a_run_with_a_checkpoint(config, processes):
    run = RunDir(config.parent / "runs" / "one")
    terminal, side = pty.openpty()
    words = ["train", "--config", str(config), "--processes", processes, *LONG]
    process = subprocess.Popen(
        [sys.executable, "-c", ON_TERMINAL, "-m", "sft_play", *words],
        env=environment(),
        stdin=side,
        stdout=side,
        stderr=side,
        start_new_session=True,
    )
    os.close(side)
    try:
        signal_at_step(run, 3, process.pid, 0)
        os.close(terminal)  # the kernel sends SIGHUP, and writing to the terminal fails from now on
        assert process.wait(120) == 75
    finally:
        process.kill()
    assert read_json(run.summary)["status"] == "interrupted"
    assert (run.checkpoints / f"checkpoint-{read_json(run.summary)['optimizer_steps']}").is_dir()


def test_a_hangup_asks_for_a_checkpoint_and_is_ignored_under_nohup(config):
    run = RunDir(config.parent / "runs" / "one")
    process = start("train", "--config", config, *LONG)
    signal_at_step(run, 3, process.pid, signal.SIGHUP)
    assert_interrupted(finish(process), run, 3)
    short = ("train.max_steps=30", "train.batch_size=1", "eval.generate=false", "output.name=two")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does, for its children
    try:
        process = start("train", "--config", config, *short)
    finally:
        signal.signal(signal.SIGHUP, before)
    signal_at_step(RunDir(config.parent / "runs" / "two"), 3, process.pid, signal.SIGHUP)
    assert finish(process).code == 0


def test_a_signal_in_the_probe_ends_the_run_with_a_word(config):
    process = start("train", "--config", config, *LONG)
    seen = iter(process.stdout.readline, "")
    assert any("Effective batch:" in line for line in seen)  # the banner, and then the probe
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert done.code == 130, done
    assert "interrupted: stopped by SIGTERM before the first step, so there is nothing to save" in done.err


def test_two_ctrl_c_end_two_processes_at_once_and_what_is_saved_is_named(config):
    run = RunDir(config.parent / "runs" / "one")
    words = ("--config", config, "--processes", "2", *LONG, "train.save_steps=4", "train.eval_steps=4")
    process = start("train", *words)
    signal_at_step(run, 6, process.pid, 0)
    family = psutil.Process(process.pid).children(recursive=True)
    for rank in [one for one in family if "train_distributed.py" in " ".join(one.cmdline())]:
        rank.suspend()  # so that it cannot save before the second one
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    done = finish(process)
    assert done.code == 130, done
    last = max(int(path.name.rpartition("-")[2]) for path in run.checkpoints.glob("checkpoint-*"))
    assert f"interrupted: stopped by SIGINT at once; checkpoint-{last} is the last one saved" in done.err
    assert "Continue with: make resume" in done.err and "NGPU=2" in done.err
