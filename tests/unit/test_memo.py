"""Answers kept on disk: found again while all that they depend on is the same, and never when damaged."""

import sys

import pytest

from sft_play import memo
from sft_play.fingerprints import sources_digest
from sft_play.memo import recall, remember
from tests.conftest import file_size_limit

ABOUT = ("a model", ("t", 1), None)


@pytest.fixture(autouse=True)
def _empty(tmp_path, monkeypatch):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    memo.installed_packages.cache_clear()
    sources_digest.cache_clear()
    yield
    memo.installed_packages.cache_clear()
    sources_digest.cache_clear()


@pytest.mark.parametrize("answer", [["text"], [None], {"rows": [1, 2]}, [False, []]])
def test_an_answer_is_found_again(answer):
    assert recall("what?", *ABOUT) is None
    remember(answer, "what?", *ABOUT)
    assert recall("what?", *ABOUT) == answer


def test_another_question_or_subject_has_no_answer():
    remember(["yes"], "what?", *ABOUT)
    assert recall("who?", *ABOUT) is recall("what?", *ABOUT, "more") is None
    assert recall("what?", "another model", ("t", 1), None) is None
    assert recall("what?", "a model", ("t", "1"), None) is None


def test_a_package_of_another_version_is_asked_again(tmp_path, monkeypatch):
    (tmp_path / "site" / "torch-2.13.0.dist-info").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site")])
    remember(["yes"], "what?")
    assert recall("what?") == ["yes"]
    (tmp_path / "site" / "torch-2.13.0.dist-info").rename(tmp_path / "site" / "torch-2.13.1.dist-info")
    memo.installed_packages.cache_clear()  # as in another process
    assert recall("what?") is None


@pytest.mark.parametrize("library", ["torch", "transformers", "peft", "trl", "accelerate", "bitsandbytes"])
def test_the_libraries_of_a_step_are_among_the_packages(library):
    assert any(name.startswith(f"{library}-") for name in memo.installed_packages())


def test_own_code_that_changed_is_asked_again(tmp_path, monkeypatch):
    (tmp_path / "own" / "deeper").mkdir(parents=True)
    monkeypatch.setattr(memo, "PACKAGE", tmp_path / "own")
    for module in ("top.py", "deeper/module.py"):
        remember(["yes"], "what?")
        assert recall("what?") == ["yes"]
        (tmp_path / "own" / module).write_text("changed = True\n")
        sources_digest.cache_clear()
        assert recall("what?") is None


def test_a_damaged_answer_is_none(tmp_path):
    remember([12], "what?")
    (file,) = (tmp_path / "cache" / "answers").iterdir()
    whole = file.read_text()
    for damaged in (whole.replace("12", "13"), whole[:-1], "", "\x00" * len(whole), whole.replace("\n", "")):
        file.write_text(damaged)
        assert recall("what?") is None
    file.write_bytes(b"\xff" + whole.encode())
    assert recall("what?") is None


def test_a_disk_that_takes_no_more_costs_the_answer_and_nothing_else():
    with file_size_limit(16):
        remember(["a long answer" * 10], "what?")
    assert recall("what?") is None
