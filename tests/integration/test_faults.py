"""A faulty run ends quickly, names the rank and the reason, and leaves no process behind (docs/reference/faults.md)."""

import pytest

from tests.stress.faults import pause_whole, under_launcher, under_torchrun

pytestmark = pytest.mark.integration

LIMIT_S = 4  # parallel.timeout_s


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fault", "seconds", "code", "words"),
    [
        pytest.param("raise", 5, 1, ["in _raise", "ValueError: an injected fault"], marks=pytest.mark.faults),
        pytest.param(
            "kill",
            5,
            9,
            ["rank 1 died without reporting an error: killed by SIGKILL"],
            marks=pytest.mark.faults,
        ),
        (
            "sleep",
            LIMIT_S + 10,
            9,
            [
                "rank 1 hangs: no progress for",
                "last seen in step 4",
                "faulty_rank.py",
                "in on_step_begin",
            ],
        ),
    ],
)
def test_the_rank_is_named_and_all_end(tmp_path, fault, seconds, code, words):
    ended = under_launcher(fault, tmp_path, LIMIT_S)
    assert ended.exit_code == code and ended.seconds < seconds and ended.left_over == 0, ended
    for text in words:
        assert text in ended.message
    if fault == "sleep":
        stacks = [(tmp_path / "faulty" / "ranks" / f"{rank}.stack") for rank in range(2)]
        assert "in on_step_begin" in stacks[1].read_text()


@pytest.mark.faults  # that the watcher leaves out time in which it did not run itself, a unit test says too
def test_a_run_that_is_stopped_whole_for_longer_than_the_limit_does_not_hang(tmp_path):
    """It goes on, unless it was stopped while a rank waited for another: that wait is over, and said so."""
    ended = pause_whole(tmp_path, LIMIT_S, 3 * LIMIT_S)
    assert ended.left_over == 0 and "rank" not in ended.message, ended
    assert ended.exit_code == 0 or (ended.exit_code, "none of them hangs" in ended.message) == (9, True), (
        ended
    )


@pytest.mark.faults
def test_torchrun_by_itself_ends_too_and_the_rank_leaves_its_stack(tmp_path):
    limit_s = 20  # long enough for both ranks to come up on a busy machine
    ended = under_torchrun("sleep", tmp_path, limit_s)
    assert ended.exit_code != 0 and ended.seconds < limit_s + 10 and ended.left_over == 0, ended
    assert f"timed out after {limit_s} s" in ended.message and "rank 1 was last seen" in ended.message
    assert "in on_step_begin" in (tmp_path / "faulty" / "ranks" / "1.stack").read_text()
