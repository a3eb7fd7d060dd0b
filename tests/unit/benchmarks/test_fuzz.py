"""A small part of `make fuzz`, and that it would notice what it looks for."""

import pytest

from benchmarks import fuzz
from benchmarks.fuzz_cases import KINDS, make_case
from benchmarks.mutations import Case
from sft_play.errors import DataError

SEED, CASES = 1, 200


@pytest.fixture
def setting(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sft_play.data.limits.ROW_SECONDS", 0.5)
    return fuzz.make_setting(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_broken_input_ends_in_a_result_or_one_error(setting, kind):
    outcomes = [
        fuzz.judge(number, make_case(SEED, number, (kind,)), setting) for number in range(CASES // len(KINDS))
    ]
    assert [outcome for outcome in outcomes if outcome.problem] == []
    assert len({outcome.said for outcome in outcomes}) > 1  # some are refused, others are not


def test_a_case_is_the_same_for_the_same_seed():
    assert [make_case(7, number) for number in range(40)] == [make_case(7, number) for number in range(40)]
    assert make_case(7, 1) != make_case(8, 1)


def test_what_is_not_an_error_for_the_user_fails(setting, monkeypatch):
    case = Case("rows", b'{"question": "a", "answer": "b"}\n', ".jsonl")
    assert fuzz.judge(0, case, setting).problem is None
    for error in (KeyError("x"), MemoryError(), DataError(""), DataError("x" * 9999)):

        def fail(*_, error=error):
            raise error

        monkeypatch.setattr(fuzz, "encode_chunk", fail)
        assert fuzz.judge(0, case, setting).problem, error


def test_a_worker_that_dies_or_hangs_is_reported_and_replaced(monkeypatch):
    monkeypatch.setattr(fuzz, "work", dies_at_three)
    monkeypatch.setattr(fuzz, "CLOCK_SECONDS", 30.0)
    outcomes, peak = fuzz.run_share(0, [1, 2, 3, 4], KINDS)
    assert [outcome.number for outcome in outcomes] == [1, 2, 3, 4] and peak == 5
    assert [bool(outcome.problem) for outcome in outcomes] == [False, False, True, False]


def dies_at_three(seed, numbers, kinds, results):
    for number in numbers:
        if number == 3:
            return
        results.send(fuzz.Outcome(number, "rows", "rows", 0.0))
    results.send(5)
