"""The program that kills runs in all their phases: a few of its trials, cut and continued."""

import json
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY
from tests.integration.cli import environment

pytestmark = [pytest.mark.integration, pytest.mark.faults]


def trials(results, *flags: str) -> tuple[dict, list[str]]:
    """The counts that the program writes, and a line for each trial that it ran."""
    command = [sys.executable, "-m", "benchmarks.kills", "--ddp", "0", "--zero2", "0", "--results", results]
    done = subprocess.run(
        [*command, *flags], env=environment(), cwd=REPOSITORY, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    kinds = json.loads((results / "kills.json").read_text())["kinds"]
    return kinds, [line for line in done.stdout.splitlines() if "operation" in line]


def test_a_run_that_is_killed_in_any_phase_goes_on_and_so_do_the_trials(tmp_path):
    _, first = trials(tmp_path, "--data", "1", "--save", "2", "--result", "0", "--merge", "0")
    kinds, second = trials(tmp_path, "--data", "1", "--save", "2", "--result", "1", "--merge", "2")
    assert [len(first), len(second)] == [3, 3]
    counts = {kind: found["trials"] for kind, found in kinds.items()}
    assert counts == {"data": 1, "save": 2, "result": 1, "merge": 2}
    for found in kinds.values():
        assert found["went_on_to_the_same_weights"] == found["trials"] and found["wrong"] == []
