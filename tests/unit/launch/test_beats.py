import faulthandler
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

from sft_play.launch.beats import (
    LOADING,
    Beat,
    OwnTime,
    Pulse,
    hanging,
    is_overdue,
    is_stalled,
    read_beats,
    read_stack,
)
from sft_play.launch.ranks import clear_reports, reports_folder
from sft_play.launch.watch import Watch
from sft_play.runlog import RunDir
from sft_play.train.callbacks import Heartbeat

OWN = (
    'Current thread 0x1 (most recent call first):\n  File "rows.py", line 7 in read\n'
    '  File "trainer.py", line 1 in train\n'
)
WAITS = (
    'Current thread 0x1 (most recent call first):\n  File "torch/distributed/c10d.py", line 7 in all_reduce\n'
)
WAITS_FOR_A_GPU = (
    'Current thread 0x1 (most recent call first):\n  File "transformers/trainer.py", line 7 in _get_grad_norm\n'
    '  File "sft_play/train/trainer.py", line 1 in _get_grad_norm\n'
)
OTHER = 'Thread 0x2 (most recent call first):\n  File "threading.py", line 1 in wait\n\n'


@pytest.fixture
def run(tmp_path):
    reports_folder(RunDir(tmp_path)).mkdir()
    return RunDir(tmp_path)


def beat(rank: int, age_s: float = 11.0) -> Beat:
    return Beat(rank, 1, 10.0, "step 4", age_s)


def test_a_sign_of_life_says_where_and_a_signal_asks_for_the_stack(run):
    pulse = Pulse(run, 3, 10)
    pulse.beat("step 4")
    pulse.beat("step 5")
    (found,) = read_beats(run, range(8))
    assert (found.rank, found.pid, found.limit_s, found.where) == (
        3,
        os.getpid(),
        10.0,
        "step 5",
    ) and found.age_s < 5
    os.kill(os.getpid(), signal.SIGUSR2)
    deadline = time.monotonic() + 5
    while not read_stack(run, 3) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "test_a_sign_of_life" in read_stack(run, 3)
    pulse.stop()
    clear_reports(run, [3])
    assert read_beats(run, [3]) == [] and read_stack(run, 3) == ""


def test_a_save_that_fails_gives_no_sign_of_life(run):
    """It would hide that this rank has waited in vain for one that hangs."""
    with pytest.raises(RuntimeError), Heartbeat(run, 0, 60, exits=False).saving(90):
        raise RuntimeError("timed out")
    faulthandler.cancel_dump_traceback_later()
    (found,) = read_beats(run, [0])
    assert (found.where, found.limit_s) == ("saving", 90)


def test_all_must_have_stood_still_for_the_limit():
    assert is_stalled([beat(0), beat(1, 30.0)])
    assert not is_stalled([beat(0, 1.0), beat(1, 30.0)])  # one has just moved: the other crashed
    assert not is_stalled([])


def test_to_load_for_long_is_no_hang_unless_another_one_has_waited_for_it():
    loading = [replace(beat(rank), where=LOADING) for rank in range(2)]
    assert not is_stalled(loading) and not is_overdue([replace(loading[0], age_s=100.0)])
    assert is_stalled(loading, timed_out=True)


@pytest.mark.parametrize("waits", [WAITS, WAITS_FOR_A_GPU])
def test_the_one_that_hangs_is_told_from_those_that_wait(run, waits):
    for rank, text in enumerate([OTHER + waits, OTHER + OWN, waits]):
        (reports_folder(run) / f"{rank}.stack").write_text(text)
    told = hanging(run, [beat(rank) for rank in range(3)])
    assert list(told) == [1]
    assert told[1].splitlines()[:2] == [
        "rank 1 hangs: no progress for 11 s (parallel.timeout_s is 10), last seen in step 4",
        '  File "rows.py", line 7 in read',
    ]


def test_a_process_that_gives_no_stack_is_named_all_the_same(run):
    assert "no stack: the process is stopped" in hanging(run, [beat(2)])[2]


class Clock:
    """A wall clock that goes on when it is told to."""

    def __init__(self):
        self.now = time.time()

    def __call__(self) -> float:
        return self.now

    def wait(self, own_time: OwnTime, seconds: float, *, late: float = 0.0) -> None:
        self.now += seconds + late
        own_time.waited(seconds)


@pytest.mark.parametrize(("late", "stalled"), [(90.0, False), (0.0, True)])
def test_time_in_which_the_watcher_did_not_run_itself_does_not_count(run, late, stalled):
    """All were stopped for 90 s of a limit of 60, against a rank that is silent for the same time."""
    pulse = Pulse(run, 0, 60, exits=False)
    pulse.beat("step 4")
    pulse.stop()
    pulse.beat("step 4")
    clock = Clock()
    own_time = OwnTime(clock)
    for _ in range(8):
        clock.wait(own_time, 0.25)
    clock.wait(own_time, 90 - late + 0.25, late=late)
    (beat,) = read_beats(run, [0], own_time)
    assert beat.age_s == pytest.approx(92.25 - late, abs=2) and is_stalled([beat]) == stalled
    assert is_overdue([beat]) == stalled


def test_only_pauses_after_a_heartbeat_make_it_younger():
    clock = Clock()
    own_time, began = OwnTime(clock), clock.now
    clock.wait(own_time, 0.25, late=50)
    beat = clock.now
    clock.wait(own_time, 30)
    clock.wait(own_time, 0.25, late=20)
    assert own_time.since(beat) == pytest.approx(30.25) and own_time.paused(beat) == 20
    assert own_time.since(began) == pytest.approx(30.5) and own_time.paused(began) == 70
    clock.wait(own_time, 0.25, late=0.9)  # a busy machine
    clock.wait(own_time, 0.25, late=-9)  # a clock that was set back
    assert own_time.paused(began) == 70


WATCHER = """
import sys, time
from sft_play.launch.beats import OwnTime
own_time, began, seen = OwnTime(), time.time(), 0
print("up", flush=True)
while not own_time.paused(began) and time.time() - began < 30:
    time.sleep(0.1)
    own_time.waited(0.1)
print(time.time() - began, own_time.since(began), flush=True)
"""


def test_a_process_that_was_stopped_knows_for_how_long():
    watcher = subprocess.Popen([sys.executable, "-c", WATCHER], stdout=subprocess.PIPE, text=True)
    assert watcher.stdout.readline() == "up\n"
    watcher.send_signal(signal.SIGSTOP)
    time.sleep(1.6)
    watcher.send_signal(signal.SIGCONT)
    whole, own = map(float, watcher.communicate(timeout=30)[0].split())
    assert 1.2 < whole - own <= whole


def test_a_rank_is_overdue_when_it_should_have_failed_itself():
    late = beat(0, 10 + 11)
    assert is_overdue([beat(1, 1.0), late]) and not is_overdue([beat(0, 10 + 9)]) and not is_overdue([])
    for where in ("model setup", "done"):  # no limit counts there
        assert not is_overdue([replace(late, where=where)])


@pytest.mark.parametrize("paused", [0, 95])
def test_the_watch_tells_ranks_that_hang_from_those_that_were_stopped_with_it(run, paused):
    (reports_folder(run) / "0.beat").write_text("1 60.0 step 4")
    os.utime(reports_folder(run) / "0.beat", times=(time.time() - 100,) * 2)
    watch = Watch(subprocess.Popen(["true"]), "rank.py", range(1), run)
    clock = Clock()
    clock.now -= paused
    watch._own_time = OwnTime(clock)
    clock.now += paused
    watch.until_end()
    assert (watch.paused_s > 90, bool(watch.hung)) == (paused > 0, paused == 0)


DEAF = "import signal, time; signal.signal(signal.SIGUSR2, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def test_a_rank_that_has_ended_does_not_hang(run):
    """NCCL ends the ranks that have waited for the one that hangs."""
    ended = psutil.Popen(["true"])
    hangs = psutil.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE, text=True)
    assert hangs.stdout.readline() == "up\n"
    ended.wait()
    for rank, process in enumerate((ended, hangs)):
        (reports_folder(run) / f"{rank}.beat").write_text(f"{process.pid} 60.0 step 4")
    watch = Watch(subprocess.Popen(["true"]), "rank.py", range(2), run)
    watch._ranks = {process.pid: process for process in (ended, hangs)}
    try:
        assert list(watch._hanging_ranks()) == [1]
    finally:
        hangs.kill()
        hangs.wait()
