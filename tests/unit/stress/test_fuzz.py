"""A small part of `make fuzz`, and that it would notice what it looks for."""

from types import SimpleNamespace

import pytest

from sft_play.errors import DataError
from tests.stress import fuzz, fuzz_runs
from tests.stress.fuzz_cases import KINDS, PROCESS, make_case
from tests.stress.mutations import Case

SEED, CASES = 1, 200


@pytest.fixture
def setting(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sft_play.data.limits.ROW_SECONDS", 0.5)
    monkeypatch.setattr(
        fuzz, "CPU_SECONDS", 30.0
    )  # as long as none hangs; how fast they are, `make fuzz` says
    return fuzz.make_setting(tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != PROCESS])
def test_broken_input_ends_in_a_result_or_one_error(setting, kind):
    outcomes = [
        fuzz.judge(number, make_case(SEED, number, (kind,)), setting) for number in range(CASES // len(KINDS))
    ]
    assert [outcome for outcome in outcomes if outcome.problem] == []
    assert len({outcome.said for outcome in outcomes}) > 1  # some are refused, others are not


def test_a_case_is_the_same_for_the_same_seed():
    assert [make_case(7, number) for number in range(40)] == [make_case(7, number) for number in range(40)]
    assert make_case(7, 1) != make_case(8, 1)


def test_a_share_of_the_cases_are_processes():
    cases = [make_case(SEED, number) for number in range(3000)]
    share = sum(case.kind == PROCESS for case in cases) / len(cases)
    assert 0.001 < share < 0.01 and {case.kind for case in cases} == set(KINDS)


@pytest.mark.parametrize(("console", "said"), [("file", "config-schema 0"), ("full", "config-schema 6")])
def test_a_process_ends_as_promised(setting, console, said):
    case = Case(PROCESS, b"0", words=("config-schema",), console=console, environment=(("RANK", "abc"),))
    assert fuzz.judge(0, case, setting).said == said


def test_what_ends_otherwise_than_promised_fails(setting, monkeypatch):
    yes = b'{"setting": "PUBLIC", "value": "1", "typed": true}'
    pushed = Case("yes-no", yes, words=("push", "REPO=user/name"))
    printed = Case("console", b"9", words=("config-schema",), console="cut pipe")
    assert [fuzz.judge(0, case, setting).said for case in (pushed, printed)] == ["yes", "exit 0"]
    monkeypatch.setattr(fuzz_runs, "YES", set())
    monkeypatch.setattr(fuzz_runs.cli, "report_error", lambda error: 1)
    monkeypatch.setattr(fuzz_runs.cli, "require_output", lambda: 1 / 0)
    for case, word in ((pushed, "'1' is taken as yes, not refused"), (printed, "ZeroDivisionError")):
        assert word in fuzz.judge(0, case, setting).problem
    monkeypatch.setattr(fuzz_runs, "prepare", lambda *_, **__: SimpleNamespace(stats=NOTHING_TRAINED))
    data = Case("source", b'{"files": [], "config": {"data": {"train_path": "rows.jsonl"}}}')
    assert "train has 3 rows and no supervised token" in fuzz.judge(0, data, setting).problem


NOTHING_TRAINED = {"train": {"rows": 3, "supervised_tokens": 0}, "val": None, "test": None}


def test_what_is_not_an_error_for_the_user_fails(setting, monkeypatch):
    case = Case("rows", b'{"question": "a", "answer": "b"}\n', ".jsonl")
    assert fuzz.judge(0, case, setting).problem is None
    for error in (KeyError("x"), MemoryError(), DataError(""), DataError("x" * 9999)):

        def fail(*_, error=error):
            raise error

        monkeypatch.setattr(fuzz, "encode_chunk", fail)
        assert fuzz.judge(0, case, setting).problem, error


@pytest.mark.thorough
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
