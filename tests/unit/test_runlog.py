import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sft_play.cache import cache_dir
from sft_play.errors import RunInUseError, StorageError
from sft_play.runlog import (
    RunDir,
    append_metrics,
    held_since,
    hold_run,
    open_run,
    read_json,
    read_metrics,
    set_aside_earlier_run,
    update_summary,
)
from sft_play.ui.console import console, console_on_stderr, quiet_libraries


def test_a_run_directory_is_held_by_one_process_and_free_after_it_died(tmp_path):
    run = open_run(str(tmp_path), "one")
    script = (
        "import sys, time\nfrom sft_play.runlog import hold_run, open_run\n"
        f"with hold_run(open_run({str(tmp_path)!r}, 'one')):\n    print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunInUseError, match=f"in use by process {holder.pid}"), hold_run(run):
            pass
    finally:
        holder.kill()
        holder.wait()
    with hold_run(run):
        pass


def test_an_earlier_run_is_moved_aside_and_nothing_of_it_is_lost(tmp_path):
    run = open_run(str(tmp_path), "one")
    assert set_aside_earlier_run(run) is None
    update_summary(run, status="done")
    run.checkpoints.mkdir()
    (run.checkpoints / "weights").write_text("x")
    run.log.write_text("old log")
    aside = set_aside_earlier_run(run)
    assert re.fullmatch(r"one\.\d{8}-\d{4}", aside.name)
    assert read_json(aside / "summary.json") == {"status": "done"}
    assert (aside / "checkpoints" / "weights").read_text() == "x" and (
        aside / "log.txt"
    ).read_text() == "old log"
    assert not run.checkpoints.exists() and not run.summary.exists()
    for name in ("one.20261120-1030", "one.20261120-1030-2"):  # as the list says when it started
        update_summary(run, status="done")
        run.write_json(run.environment, {"started": "2026-11-20 10:30"})
        assert set_aside_earlier_run(run).name == name


@pytest.mark.parametrize("kind", ["link", "device", "pipe", "folder", "huge"])
def test_only_regular_files_of_a_bounded_size_are_read(tmp_path, kind):
    """A link out of the folder, a device without an end, a pipe that nobody writes to, a sparse terabyte."""
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    (tmp_path / "secret").write_text('{"step": 1}\n')
    for path in (run.summary, run.metrics):
        if kind == "folder":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "huge":
            path.touch()
            os.truncate(path, 2**40)
        else:
            path.symlink_to("/dev/zero" if kind == "device" else tmp_path / "secret")
    assert read_json(run.summary) == {} and read_metrics(run) == []
    (run.path / ".lock").symlink_to("/dev/zero")
    assert held_since(run) is None


def test_metrics_after_a_resume_count_once_and_a_cut_line_is_left_out(tmp_path):
    run = open_run(str(tmp_path), "one")
    for record in (
        {"step": 1, "train/loss": 3.0},
        {"step": 2, "train/loss": 2.0},
        {"step": 2, "eval/loss": 2.5},
    ):
        append_metrics(run, record)
    append_metrics(run, {"step": 2, "train/loss": 1.9})
    with run.metrics.open("a") as file:
        file.write('{"step": 3, "tr')
    assert [r.get("train/loss", r.get("eval/loss")) for r in read_metrics(run)] == [3.0, 1.9, 2.5]


@pytest.mark.skipif(
    os.geteuid() != 0 and not os.access("/proc", os.R_OK), reason="needs a folder that cannot be written"
)
def test_a_folder_that_cannot_be_written_is_a_storage_error():
    with pytest.raises(StorageError, match="cannot write .*output.dir=<folder>"):
        open_run("/proc", "one")


def test_a_cache_that_cannot_be_written_is_put_elsewhere_by_its_variable(tmp_path, monkeypatch):
    """`plan` in a folder that is read-only: its log is in the cache, which output.dir= does not move."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(StorageError, match="set SFT_PLAY_CACHE=<another folder>") as error:
        with quiet_libraries(cache_dir() / "plan.log"):
            pass
    assert "output.dir" not in str(error.value)
    with pytest.raises(StorageError, match="set output.dir=<folder>"):
        with quiet_libraries(tmp_path / "file" / "log.txt"):
            pass


def test_libraries_write_to_the_log_and_people_read_the_console(tmp_path):
    script = (
        "import os, sys, warnings\nfrom pathlib import Path\nfrom sft_play.ui.console import "
        "console, printing_aloud, quiet_libraries\n"
        f"with quiet_libraries(Path({str(tmp_path / 'log.txt')!r})):\n"
        "    print('library print'); sys.stderr.write('library stderr\\n')\n"
        "    os.write(2, b'from C\\n'); warnings.warn('old name')\n"
        "    console().print('for people')\n"
        "    with printing_aloud():\n        print({'step': 1}); print('no end', end='')\n"
        f"    with quiet_libraries(Path({str(tmp_path / 'inner.txt')!r})):\n"
        "        print('inner print'); console().print('for people too')\n"
        "print('after')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "for people\n{'step': 1}\nno end\nfor people too\nafter\n" and done.stderr == ""
    log = (tmp_path / "log.txt").read_text()
    for text in ("library print", "library stderr", "from C", "inner print"):
        assert text in log


def test_a_command_with_json_keeps_stdout_free_and_leaves_the_console_as_it_was(capsys):
    with console_on_stderr():
        console().print("to a person")
    console().print("to a person again")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("to a person again\n", "to a person\n")


def test_what_a_run_that_failed_early_left_is_not_set_aside_and_open_files_stay(tmp_path):
    run = open_run(str(tmp_path), "one")
    run.checkpoints.mkdir()
    run.log.write_text("failed early")
    assert set_aside_earlier_run(run) is None
    update_summary(run, status="done")
    (run.path / "launcher.log").write_text("launching")
    with run.log.open("a") as log:
        aside = set_aside_earlier_run(run)
        log.write("new line")
    assert (aside / "log.txt").read_text() == "failed early"
    assert run.log.read_text() == "new line" and (run.path / "launcher.log").exists()


def test_machines_that_share_a_run_directory_hold_it_side_by_side(tmp_path):
    run = open_run(str(tmp_path), "shared")
    with hold_run(run), hold_run(run, 1), pytest.raises(RunInUseError), hold_run(run, 1):
        pass


@pytest.mark.parametrize(
    ("path", "typed"),
    [("runs/a", "a"), ("elsewhere/a", "elsewhere/a"), ("/data/runs/a", "/data/runs/a"), ("a", "./a")],
)
def test_a_run_is_typed_by_its_name_or_by_its_folder(path, typed):
    run = RunDir(Path(path))
    assert run.typed == typed
    assert run.resume_command(2) == f"make resume RUN={typed} NGPU=2"
