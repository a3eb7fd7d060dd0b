"""Where the seconds before the first step go."""

import time

import pytest

from sft_play import start


@pytest.fixture
def clock(monkeypatch):
    """A clock of a run that has just begun, and the seconds that pass, which are moved by hand."""
    passed = [100.0]
    monkeypatch.setattr(start, "_clock", start.Clock())
    monkeypatch.setattr(start.time, "monotonic", lambda: passed[0])
    monkeypatch.setattr(start.time, "time", lambda: 5000 + passed[0])
    monkeypatch.setattr(start, "_process_began", lambda: 5090.0)
    monkeypatch.delenv(start.BEGAN_VARIABLE, raising=False)
    return passed


def one_start(passed):
    with start.part("plan"):
        passed[0] += 2
        with start.part("imports"):
            passed[0] += 4
        passed[0] += 1
    with start.part("imports"):
        passed[0] += 3
    passed[0] += 5


def test_seconds_belong_to_the_innermost_part_and_the_rest_is_named(clock):
    one_start(clock)
    found = start.seconds_of_start()
    assert found == {"imports": 7, "plan": 3, "other": 15, "all": 25}
    assert list(found) == ["imports", "plan", "other", "all"]
    assert start.start_line(found) == (
        "25.0 s from the command to the first step: imports 7.0, plan 3.0, other 15.0"
    )
    clock[0] += 50
    assert start.seconds_of_start() == found  # training is no part of it


def test_another_run_of_the_process_begins_anew(clock):
    start.run_begins()  # the first one: the seconds of the process are its own
    one_start(clock)
    assert start.seconds_of_start()["all"] == 25
    start.run_begins()
    one_start(clock)
    assert start.seconds_of_start() == {"imports": 7, "plan": 3, "other": 5, "all": 15}


def test_a_rank_knows_what_passed_before_it(clock, monkeypatch):
    monkeypatch.setenv(start.BEGAN_VARIABLE, "5060")
    one_start(clock)
    assert start.seconds_of_start() == {"launch": 30, "imports": 7, "plan": 3, "other": 15, "all": 55}


def test_a_process_knows_when_it_began():
    assert 0 < time.time() - start._process_began() < 24 * 3600
