"""`make test ARGS="-p tests.margins"` prints which tests come closest to their tolerances."""

import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

TESTS = """
import pytest

@pytest.mark.parametrize("found", [1.0, 1.009, 1.001, 1.004])
def test_a(found):
    assert found == pytest.approx(1.0, abs=0.01)
"""


@pytest.mark.thorough
def test_the_three_lowest_margins_are_printed(tmp_path):
    file = tmp_path / "test_one.py"
    file.write_text(TESTS)
    options = ["-q", "-p", "tests.margins", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", *options, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    shares = [line.split("%")[0].strip() for line in done.stdout.splitlines() if "% left" in line]
    assert shares == ["10.0", "60.0", "90.0"], done.stdout
