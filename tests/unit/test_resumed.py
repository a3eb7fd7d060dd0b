"""A long suite that was cut goes on with what has not passed."""

import pytest

from tests.resumed import Resumed

pytest_plugins = ["pytester"]
SUITE = """
import os
import pytest

@pytest.fixture
def cleaned():
    yield
    assert "dirty" not in os.environ["NOW"]

def test_a(): pass
def test_b(): assert "broken" not in os.environ["NOW"]
def test_c(cleaned): pass
def test_d():
    if "cut" in os.environ["NOW"]:
        pytest.exit("cut", returncode=9)
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """`run(now)`: the exit status of the suite under these conditions, and the letters of the tests it ran."""
    pytester.makepyfile(SUITE)
    pytester.makeini("[pytest]")

    def session(now: str, *words: str) -> tuple[int, str]:
        monkeypatch.setenv("NOW", now)
        result = pytester.runpytest_inprocess(
            "-v", *words, plugins=[Resumed(pytester.path / "passed" / "names")]
        )
        return int(result.ret), "".join(name for name in "abcd" if f"::test_{name} " in result.stdout.str())

    return session


def test_only_what_has_not_passed_is_run_again_until_all_have(run, pytester):
    assert run("broken dirty cut") == (9, "abcd")
    assert run("", "--collect-only")[0] == 0
    assert run("dirty") == (1, "bcd")
    assert run("") == (0, "c")
    assert not list((pytester.path / "passed").iterdir()) and run("") == (0, "abcd")


def test_a_suite_that_was_cut_after_its_last_test_has_passed(run, pytester):
    (pytester.path / "passed").mkdir()
    [file] = pytester.path.glob("test_*.py")
    names = [f"{file.name}::test_{name}" for name in "abcd"]
    (pytester.path / "passed" / "names").write_text("\n".join(names))
    assert run("") == (0, "") and run("") == (0, "abcd")
