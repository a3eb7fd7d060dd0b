import json

import pytest

from sft_play.errors import (
    ConfigError,
    DataError,
    DoesNotFitError,
    Interrupted,
    LaunchError,
    OutOfMemory,
    SftPlayError,
    StorageError,
)
from sft_play.launch.ranks import (
    RankEnvironment,
    RankExit,
    cause_here,
    clear_reports,
    finish_rank,
    outcome,
    raise_unless_done,
    read_rank_exits,
    reports_folder,
    write_problem,
)
from sft_play.runlog import RunDir

TORCHRUN = {
    "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "1"
}  # fmt: skip


@pytest.fixture
def run(tmp_path):
    return RunDir(tmp_path)


def rank(folder, number=0, **rest):
    return RankEnvironment(rank=number, world_size=4, reports_folder=folder, **rest)


def test_reports_come_back_in_the_order_of_time_and_broken_ones_are_passed_over(run):
    finish_rank(rank(reports_folder(run), 1), 4, "out of memory")
    finish_rank(rank(reports_folder(run), 0), 1, "Traceback")
    (reports_folder(run) / "2.json").write_text("{")
    assert [(report.rank, report.code) for report in read_rank_exits(run, range(4))] == [(1, 4), (0, 1)]
    clear_reports(run, range(2))
    assert read_rank_exits(run, range(2)) == []


def test_memory_that_ran_out_while_training_is_told_from_a_plan_that_does_not_fit(run):
    for error, kind in ((OutOfMemory, OutOfMemory), (DoesNotFitError, DoesNotFitError)):
        finish_rank(rank(reports_folder(run)), 4, "at micro-batch 4", error.__name__)
        with pytest.raises(DoesNotFitError, match="at micro-batch 4") as raised:
            raise_unless_done(result(read_rank_exits(run, range(2)), ranks=(0,)))
        assert type(raised.value) is kind


def test_a_rank_without_our_launcher_keeps_its_exit_code(tmp_path):
    assert finish_rank(rank(None), 75) == 75 and not list(tmp_path.iterdir())


def test_a_rank_that_saved_ends_with_0_so_that_the_others_may_finish_writing(tmp_path):
    third = rank(tmp_path / "ranks", 3)
    assert finish_rank(third, 75, "saved") == 0 and finish_rank(third, 4) == 4
    assert json.loads((tmp_path / "ranks" / "3.json").read_text())["code"] == 4


def test_a_disk_that_cannot_take_the_report_leaves_the_exit_code(tmp_path):
    (tmp_path / "file").write_text("")
    assert finish_rank(rank(tmp_path / "file" / "ranks"), 6) == 6


def result(exits, status=1, ranks=(0, 1), started=True, stopped_by=None, log=""):
    return outcome(exits, ranks, status, started=started, stopped_by=stopped_by, log_tail=log)


OOM = RankExit(1, 4, "out of memory", 2.0)
BUG = RankExit(0, 1, "Traceback ... ZeroDivisionError", 1.0)
LOST = RankExit(0, 1, "RuntimeError: Connection closed by peer [127.0.0.1]:4711", 1.0)


@pytest.mark.parametrize(
    ("exits", "code", "message"),
    [
        ([RankExit(0, 0), RankExit(1, 0)], 0, ""),
        ([OOM], 4, "out of memory"),
        ([LOST, OOM], 4, "out of memory"),  # the other one only lost its peer
        ([BUG, OOM], 4, "out of memory"),  # a known error says more than a traceback
        ([BUG], 1, "ZeroDivisionError"),
        ([LOST], 9, "rank 1 died without reporting an error"),
        ([LOST, RankExit(1, 1, "timed out", 2.0)], 1, "Connection closed"),  # nobody else to blame
        ([], 9, "ranks 0, 1 died without reporting an error"),
        ([RankExit(0, 75, "saved"), RankExit(1, 75, "saved")], 75, "saved"),
        ([RankExit(0, 75, "saved"), OOM], 4, "out of memory"),
        (
            [RankExit(0, 75, "SIGTERM")],
            9,
            "rank 1 died without reporting an error",
        ),  # torchrun told the survivor to stop
    ],
)
def test_the_rank_that_was_the_cause_decides_the_outcome(exits, code, message):
    found = result(exits, status=0 if code in (0, 75) else 1)
    assert found.code == code and message in found.message


def test_a_launcher_that_started_nothing_shows_its_own_words():
    found = result([], started=False, log="RuntimeError: no such backend")
    assert found.code == LaunchError.exit_code
    assert "status 1 before it started a rank" in found.message and "no such backend" in found.message


def test_a_stop_before_anything_could_be_saved_ends_as_ctrl_c_does():
    stopped = result([], stopped_by="SIGTERM")
    assert (stopped.code, stopped.message) == (130, "stopped by SIGTERM")
    with pytest.raises(KeyboardInterrupt, match="stopped by SIGTERM"):
        raise_unless_done(stopped)


def test_a_script_that_does_not_report_is_done_when_the_launcher_is():
    assert result([], status=0).code == 0


@pytest.mark.parametrize("kind", [DataError, DoesNotFitError, Interrupted, LaunchError])
def test_an_outcome_becomes_the_error_with_its_exit_code(kind):
    with pytest.raises(kind, match="what the rank said"):
        raise_unless_done(RankExit(1, kind.exit_code, "what the rank said"))


def test_a_bug_of_ours_keeps_exit_code_1_and_a_second_ctrl_c_stays_one():
    with pytest.raises(SftPlayError) as caught:
        raise_unless_done(BUG)
    assert caught.value.exit_code == 1
    with pytest.raises(KeyboardInterrupt):
        raise_unless_done(RankExit(0, 130))
    raise_unless_done(RankExit(0, 0))


def test_a_process_that_breaks_after_all_said_they_were_done_takes_nothing_back():
    done = [RankExit(0, 0), RankExit(1, 0)]
    assert result(done, status=1).code == 0
    assert result(done[:1], status=1).code == LaunchError.exit_code


ROOT_CAUSE = """Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_03:45:23
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 27149)
"""


@pytest.mark.parametrize(
    ("status", "tail", "message"),
    [
        (
            1,
            ROOT_CAUSE,
            "rank 1 died without reporting an error: killed by SIGKILL, possibly by the out-of-memory killer",
        ),
        (1, ROOT_CAUSE.replace("-9", "-11"), "rank 1 died without reporting an error: killed by SIGSEGV"),
        (1, ROOT_CAUSE.replace(": 1 (local", ": 0 (local"), "crashed or killed"),
        (-9, "", "accelerate launch was killed by SIGKILL"),
    ],
)
def test_a_silent_end_is_explained_as_far_as_it_is_known(status, tail, message):
    said = [RankExit(0, 1, "RuntimeError: Connection closed by peer", 1.0)]
    result = outcome(said, range(2), status, started=True, stopped_by=None, log_tail=tail)
    assert result.code == LaunchError.exit_code and message in result.message


def test_ranks_that_cannot_report_on_a_full_disk_end_with_the_code_of_a_disk(run):
    assert write_problem(run, 2) is None and not list(reports_folder(run).iterdir())
    reports_folder(run).rmdir()
    reports_folder(run).write_text("")
    problem = write_problem(run, 2)
    result = outcome([], range(2), 1, started=True, stopped_by=None, log_tail=ROOT_CAUSE, unwritable=problem)
    assert result.code == StorageError.exit_code
    assert result.message.startswith("ranks 0, 1 ended, and cannot say why, as")
    assert "File exists. Free space" in result.message and "NGPU=2" in result.message


def test_of_several_silent_ranks_the_first_that_failed_is_named():
    """The others were stopped by torchrun before they could report."""
    result = outcome([], range(2), 1, started=True, stopped_by=None, log_tail=ROOT_CAUSE)
    assert result.message.startswith("rank 1 died without reporting an error: killed by SIGKILL")


def test_ranks_that_timed_out_since_nothing_ran_are_not_said_to_hang():
    settings = dict(started=True, stopped_by=None, log_tail="", paused_s=90.0)
    late = RankExit(1, 9, "timed out after 60 s (parallel.timeout_s) waiting for the other processes", 2.0)
    for exits in ([late], [LOST, late]):
        found = outcome(exits, range(2), 1, **settings)
        assert found.code == LaunchError.exit_code and "did not run for 90 s" in found.message
        assert "none of them hangs" in found.message and "make resume" in found.message
    assert outcome([OOM, late], range(2), 1, **settings).message == OOM.message
    assert outcome([RankExit(0, 0), RankExit(1, 0)], range(2), 0, **settings).code == 0
    assert "died without reporting" in outcome([], range(2), 1, **settings).message


def test_a_kernel_that_kills_for_lack_of_memory_is_told():
    settings = dict(started=True, stopped_by=None, log_tail=ROOT_CAUSE)
    assert "no memory left" not in outcome([], range(2), 1, **settings).message
    found = outcome([], range(2), 1, **settings, kernel_killed=True)
    assert (
        "killed by SIGKILL" in found.message and "had no memory left: make the run need less" in found.message
    )


def test_a_rank_that_hangs_is_the_cause_of_the_others_timeouts():
    said = [RankExit(0, 9, "timed out after 10 s waiting for the other processes", 1.0)]
    result = outcome(said, range(2), 1, started=True, stopped_by=None, log_tail="", hung={1: "rank 1 hangs"})
    assert (result.rank, result.code, result.message) == (1, LaunchError.exit_code, "rank 1 hangs")
    real = [RankExit(1, 3, "rows.jsonl:7", 1.0)]
    assert (
        outcome(real, range(2), 1, started=True, stopped_by=None, log_tail="", hung={0: "rank 0 hangs"}).code
        == 3
    )


def test_machines_tell_what_began_with_them_and_not_what_they_suffered_from_another():
    lost = RankExit(0, 1, "RuntimeError: Connection closed by peer [10.0.0.2]:1234")
    assert cause_here([lost], ended=1) is None
    assert cause_here([RankExit(0, 0), RankExit(1, 75)], ended=2) is None
    assert cause_here([lost, RankExit(1, 3, "rows.jsonl:7")], ended=2) == RankExit(1, 3, "rows.jsonl:7")
    silent = cause_here([], ended=1)
    assert (
        silent
        and silent.code == LaunchError.exit_code
        and "died without reporting an error" in silent.message
    )


def test_a_process_on_its_own_is_the_main_rank_of_a_world_of_one():
    ranks = RankEnvironment.read({})
    assert (
        ranks == RankEnvironment() and ranks.is_main and not ranks.spans_machines and not ranks.launched_by_us
    )


def test_what_torchrun_says_is_read_whole():
    ranks = RankEnvironment.read(TORCHRUN)
    assert (ranks.rank, ranks.world_size, ranks.local_rank, ranks.local_world_size) == (5, 8, 1, 4)
    assert ranks.spans_machines and not ranks.is_main


def test_a_launcher_that_does_not_name_the_processes_of_a_machine_has_one_machine():
    assert not RankEnvironment.read({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}).spans_machines
    assert (
        RankEnvironment.read({k: v for k, v in TORCHRUN.items() if k != "LOCAL_WORLD_SIZE"}).local_world_size
        == 8
    )


@pytest.mark.parametrize("text", ["two", "0", "-1", ""])
def test_a_world_size_that_is_no_number_is_refused(text):
    with pytest.raises(ConfigError, match=f"WORLD_SIZE={text}: expected a whole number"):
        RankEnvironment.read({"WORLD_SIZE": text})


@pytest.mark.parametrize(
    ("name", "text"),
    [("RANK", "abc"), ("RANK", "8"), ("LOCAL_RANK", "-1"), ("LOCAL_RANK", "4"), ("LOCAL_WORLD_SIZE", "0"),
     ("LOCAL_WORLD_SIZE", "9"), ("RANK", "9" * 5000), ("SFT_PLAY_PROCESSES", "two"), ("RANK", "\u0665")],
)  # fmt: skip
def test_a_place_that_is_no_number_within_the_world_is_refused(name, text):
    with pytest.raises(ConfigError, match=f"{name}={text}: expected a whole number from"):
        RankEnvironment.read({**TORCHRUN, name: text})


def test_a_world_without_its_companions_is_refused_with_their_names():
    with pytest.raises(ConfigError, match="RANK, MASTER_PORT not set: start all processes with torchrun"):
        RankEnvironment.read({"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "here"})


def test_a_world_smaller_than_asked_for_is_refused():
    RankEnvironment.read({**TORCHRUN, "SFT_PLAY_PROCESSES": "8"}).require_whole_world()
    with pytest.raises(ConfigError, match=r"2 processes were requested, but the launcher started 1"):
        RankEnvironment.read({"SFT_PLAY_PROCESSES": "2"}).require_whole_world()
