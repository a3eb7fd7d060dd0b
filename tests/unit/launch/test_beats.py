import os
import signal
import time

import pytest

from sft_play.launch.beats import Beat, Pulse, hanging, is_stalled, read_beats, read_stack
from sft_play.launch.ranks import clear_reports, reports_folder
from sft_play.runlog import RunDir

OWN = (
    'Current thread 0x1 (most recent call first):\n  File "rows.py", line 7 in read\n'
    '  File "trainer.py", line 1 in train\n'
)
WAITS = (
    'Current thread 0x1 (most recent call first):\n  File "torch/distributed/c10d.py", line 7 in all_reduce\n'
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


def test_all_must_have_stood_still_for_the_limit():
    assert is_stalled([beat(0), beat(1, 30.0)])
    assert not is_stalled([beat(0, 1.0), beat(1, 30.0)])  # one has just moved: the other crashed
    assert not is_stalled([])


def test_the_one_that_hangs_is_told_from_those_that_wait(run):
    for rank, text in enumerate([OTHER + WAITS, OTHER + OWN, WAITS]):
        (reports_folder(run) / f"{rank}.stack").write_text(text)
    told = hanging(run, [beat(rank) for rank in range(3)])
    assert list(told) == [1]
    assert told[1].splitlines()[:2] == [
        "rank 1 hangs: no progress for 11 s (parallel.timeout_s is 10), last seen in step 4",
        '  File "rows.py", line 7 in read',
    ]


def test_a_process_that_gives_no_stack_is_named_all_the_same(run):
    assert "no stack: the process is stopped" in hanging(run, [beat(2)])[2]
