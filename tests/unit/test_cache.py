"""What is kept on disk is found again while all that it depends on is the same, and never when damaged."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sft_play import cache, fingerprints
from sft_play.cache import (
    cache_dir,
    clear,
    entry,
    log_of,
    private_entry,
    project_dir,
    read_value,
    recall,
    remember,
    update_value,
    write_value,
    written_to,
)
from sft_play.fingerprints import sources_digest
from tests.conftest import file_size_limit

ABOUT = ("a model", ("t", 1), None)


@pytest.fixture(autouse=True)
def _empty(tmp_path, monkeypatch):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    fingerprints.answering_packages.cache_clear()
    sources_digest.cache_clear()
    yield
    fingerprints.answering_packages.cache_clear()
    sources_digest.cache_clear()


def test_the_log_of_a_command_is_in_the_users_folder_if_the_project_is_read_only(tmp_path, monkeypatch):
    monkeypatch.delenv("SFT_PLAY_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert log_of("plan") == project_dir() / "plan.log"
    (project_dir() / "plan.log").unlink()
    project_dir().rmdir()
    project_dir().write_text("")  # no folder can be made there
    assert log_of("plan") == tmp_path / "home" / "sft-play" / "plan.log"
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    assert log_of("plan") == project_dir() / "plan.log"


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
    fingerprints.answering_packages.cache_clear()  # as in another process
    assert recall("what?") is None


def test_a_package_that_answers_nothing_may_be_installed_and_renewed(tmp_path, monkeypatch):
    """As `make site` installs some: a plan of 297 s was made anew after it."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    remember(["yes"], "what?")
    (tmp_path / "mkdocs_material-9.7.0.dist-info").mkdir()
    fingerprints.answering_packages.cache_clear()
    assert recall("what?") == ["yes"]


@pytest.mark.parametrize("library", ["torch", "transformers", "peft", "trl", "accelerate", "bitsandbytes"])
def test_the_libraries_of_a_step_are_among_the_packages(library):
    assert any(name.startswith(f"{library}-") for name in fingerprints.answering_packages())


def test_own_code_that_changed_is_asked_again(tmp_path, monkeypatch):
    (tmp_path / "own" / "deeper" / "down").mkdir(parents=True)
    monkeypatch.setattr(fingerprints, "PACKAGE", tmp_path / "own")
    for module in ("top.py", "deeper/module.py", "deeper/down/module.py"):
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


def test_a_file_that_is_not_from_here_is_absent():
    path = entry("kind", "x")
    path.parent.mkdir(parents=True)
    path.write_text('{"ratios": {"forward": 1.5}}')
    assert read_value(path) is None
    path.unlink()
    path.mkdir()  # a folder where the file would be
    write_value(path, 1)
    assert read_value(path) is None


def test_an_update_adds_to_what_is_there():
    path = entry("kind", "x")
    update_value(path, lambda found: found | {"a": 1})
    update_value(path, lambda found: found | {"b": 2})
    assert read_value(path) == {"a": 1, "b": 2}


UPDATE = """\
import sys
from sft_play.cache import entry, update_value
for number in range(20):
    update_value(entry("kind", "x"), lambda found: found | {f"{sys.argv[1]} {number}": 1})
"""


def test_no_update_of_several_processes_is_lost():
    processes = [subprocess.Popen([sys.executable, "-c", UPDATE, name]) for name in ("one", "two", "three")]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert len(read_value(entry("kind", "x"))) == 60


def test_a_cache_that_cannot_be_written_costs_what_is_kept_and_nothing_else():
    cache_dir().write_text("a file where the folder would be")
    update_value(entry("kind", "x"), lambda found: found | {"a": 1})
    remember(["yes"], "what?")
    assert read_value(entry("kind", "x")) is recall("what?") is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes somebody else")
@pytest.mark.parametrize(("mode", "found"), [(0o700, None), (0o755, ["yes"])], ids=["closed", "read-only"])
def test_a_cache_of_another_user_costs_what_is_kept_and_nothing_else(monkeypatch, mode, found):
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("SFT_PLAY_CACHE", folder)
        remember(["yes"], "what?")
        Path(folder).chmod(mode)
        os.seteuid(12345)
        try:
            assert recall("what?") == found
            remember(["no"], "what?")
            update_value(entry("kind", "x"), lambda known: known | {"a": 1})
            assert recall("what?") == found and read_value(entry("kind", "x")) is None
        finally:
            os.seteuid(0)
        assert recall("what?") == ["yes"]


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, "{home}/.cache/sft-play"),
        ({"XDG_CACHE_HOME": "{home}/elsewhere"}, "{home}/elsewhere/sft-play"),
        ({"XDG_CACHE_HOME": "relative"}, "{home}/.cache/sft-play"),
        ({"SFT_PLAY_CACHE": "{home}/own"}, "{home}/own"),
    ],
)
def test_what_belongs_to_no_project_is_kept_once_per_user(tmp_path, monkeypatch, variables, found):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("SFT_PLAY_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(home=tmp_path))
    assert cache_dir() == Path(found.format(home=tmp_path))
    project = cache_dir() if "SFT_PLAY_CACHE" in variables else Path.cwd() / ".cache" / "sft-play"
    assert project_dir() == project


def test_what_runs_when_it_is_read_is_kept_where_only_its_user_can_write(tmp_path):
    folder = private_entry("compiled", "one")
    assert folder == entry("compiled", "one") and folder.stat().st_mode & 0o777 == 0o700
    assert private_entry("compiled", "one") == folder  # as it is, again
    (folder / "code.so").write_bytes(b"x")
    for changed in (folder, cache_dir()):
        before = changed.stat().st_mode & 0o7777
        for mode in (0o777, 0o702):
            changed.chmod(mode)
            assert private_entry("compiled", "one") is None
        changed.chmod(before)
    cache_dir().chmod(0o1777)  # as of folders for temporary files: none but its owner replaces a file
    assert private_entry("compiled", "one") == folder
    assert clear(cache_dir()) and not folder.exists()


def test_what_a_writer_left_who_was_killed_is_removed_unless_another_one_writes_there():
    folder = private_entry("compiled", "one")
    code = folder / "code.so"

    def written(ending: Callable[[], object]) -> None:
        if (child := os.fork()) == 0:
            with written_to(folder):
                code.write_bytes(b"cut o")
                ending()
            os._exit(0)
        os.waitpid(child, 0)

    written(lambda: None)
    with written_to(folder) as emptied:
        assert not emptied and code.exists()
        written(lambda: os.kill(os.getpid(), signal.SIGKILL))
        with written_to(folder) as emptied:
            assert not emptied and code.exists()
    with written_to(folder) as emptied:
        assert emptied and not code.exists() and private_entry("compiled", "one") == folder


def test_a_folder_that_nobody_can_make_keeps_no_code(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "file"))
    assert private_entry("compiled", "one") is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives folders away")
def test_a_folder_of_somebody_else_keeps_no_code():
    folder = private_entry("compiled", "one")
    for changed in (folder, cache_dir()):
        os.chown(changed, 12345, -1)
        assert private_entry("compiled", "one") is None
        os.chown(changed, 0, -1)
    assert private_entry("compiled", "one") == folder


def test_what_was_used_longest_ago_makes_room_once_a_day(monkeypatch):
    monkeypatch.setattr(cache, "LIMIT_BYTES", 2500)
    paths = [entry("kind", number) for number in range(3)]
    for age, path in enumerate(paths):
        write_value(path, "x" * 1000)
        then = time.time() - 10 * cache.DAY_S * (3 - age)
        os.utime(path, (then, then))
    assert read_value(paths[0])  # the oldest, but used
    write_value(entry("kind", "first of the day"), 1)
    assert all(path.exists() for path in paths)
    (cache_dir() / ".looked").unlink()
    write_value(entry("kind", "new"), 1)
    assert [path.exists() for path in paths] == [True, False, True]


def test_built_in_models_make_room_too_and_tokenized_rows_do_not(monkeypatch):
    monkeypatch.setattr(cache, "LIMIT_BYTES", 2500)
    folders = [
        cache_dir() / kind / f"{kind}-{age:024x}" for age, kind in enumerate(("data", "builtin", "builtin"))
    ]
    for age, folder in enumerate(folders):
        folder.mkdir(parents=True)
        for path in (folder / "file", folder):
            if path != folder:
                path.write_text("x" * 2000)
            os.utime(path, (1000.0 * age, 1000.0 * age))
    os.utime(folders[1])  # used today
    write_value(entry("kind", "new"), 1)
    assert [folder.exists() for folder in folders] == [True, True, False]


def test_clearing_takes_what_is_ours_and_leaves_the_rest():
    write_value(entry("kind", "x"), 1)
    model = cache_dir() / "builtin" / f"demo-model-{'0' * 24}"
    model.mkdir(parents=True)
    (model / "weights").write_text("12345")
    other = [
        cache_dir() / name for name in ("data/letter.txt", f"photos/{'0' * 24}", "my.log", "photos/.lock")
    ]
    for path in other:
        path.parent.mkdir(exist_ok=True)
        path.write_text("somebody's")
    assert clear(cache_dir()) > 5
    assert sorted(path for path in cache_dir().rglob("*") if path.is_file()) == sorted(other)
