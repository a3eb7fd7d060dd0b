"""Figures have processes of their own, of which nothing is left."""

import os
import sys
import time

import psutil
import pytest

from benchmarks import alone
from benchmarks.alone import ended, figure

HERE = "tests.unit.benchmarks.test_alone"
# Starts a process in another session, as launchers do, says who it is, and hangs.
LEAVES_ONE = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize(("hangs_s", "code"), [(600, None), (0, 0)])
def test_nothing_is_left_of_a_command_neither_when_its_time_runs_out_nor_else(tmp_path, hangs_s, code):
    said = tmp_path / "pid"
    began = time.monotonic()
    words = [sys.executable, "-S", "-c", LEAVES_ONE, str(said), str(hangs_s)]
    assert ended(words, 1.5) == code and time.monotonic() - began < 60
    assert not psutil.pid_exists(int(said.read_text()))


def echo(*given):
    return {"given": list(given), "process": os.getpid()}


def fails():
    raise ValueError("no such thing\nat all")


def waits(seconds):
    time.sleep(seconds)


def test_a_figure_comes_from_another_process_and_what_fails_or_takes_too_long_says_so():
    late = time.monotonic() + 120
    found = figure(f"{HERE}:echo", [1, "a"], None, deadline=late)
    assert found["given"] == [[1, "a"], None] and found["process"] != os.getpid()
    assert figure(f"{HERE}:fails", deadline=late) == {"problem": "exit code 1: at all"}
    assert figure(f"{HERE}:waits", 60, deadline=late, limit_s=1) == {"problem": "no answer in 1 s"}


def test_what_the_end_of_a_slice_cuts_off_is_no_result(monkeypatch):
    assert figure("nothing:begun", deadline=time.monotonic() + 5) is None
    monkeypatch.setattr(alone, "LEAST_S", 0)
    assert figure(f"{HERE}:waits", 60, deadline=time.monotonic() + 1) is None
