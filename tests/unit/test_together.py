"""Files that start from the same long run are taken by one worker."""

from pathlib import Path

from tests.conftest import REPOSITORY
from tests.together import TOGETHER, together


def test_files_that_share_a_run_are_together_and_others_alone():
    files = [path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "tests").rglob("test_*.py")]
    found = {name: {Path(file).stem for file in files if together(file) == name} for name in TOGETHER}
    finished, forked = found["the finished run"], found["a process that has imported all"]
    assert finished >= {"test_bad_input", "test_cli", "test_disk", "test_runs", "test_streams"}
    assert forked >= {"test_after_the_probe", "test_loading", "test_many_processes", "test_sequence_parallel"}
    assert together("tests/unit/commands/test_evaluate.py") == "tests/unit/commands/test_evaluate.py"
    assert len(finished) < 12 and len(forked) < 12  # the longest worker ends the suite
