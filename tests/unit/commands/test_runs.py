"""`sft-play runs`: what is listed, and what is removed and what is not."""

import json

import pytest

from sft_play.cli import main
from sft_play.runlog import RunDir, read_json
from tests.unit.report.written_run import begin, finished, held


def test_runs_are_listed_with_model_method_status_steps_score_and_note(tmp_path, capsys):
    finished(tmp_path / "one")
    begin(tmp_path / "two", note="a higher rate")
    assert main(["runs", "--runs", str(tmp_path)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "one base LoRA done 20 exact match 50.0%" in lines
    assert any(line.startswith("two base LoRA unfinished 0 n/a a higher") for line in lines)
    assert main(["runs", "--runs", str(tmp_path), "--json"]) == 0
    found = {run["name"]: run for run in json.loads(capsys.readouterr().out)}
    assert found["one"]["held_out_loss"] == 2.0 and found["one"]["best_score"] == "exact match 50.0%"
    assert found["two"]["note"] == "a higher rate" and found["two"]["best_score"] is None


def test_the_name_of_a_run_is_in_one_piece_and_no_column_is_empty(tmp_path, capsys):
    for name in ("a-run-of-many-words", "a-run-of-many-words.20261130-0826"):
        finished(tmp_path / name)
    assert main(["runs", "--runs", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} >= {path.name for path in tmp_path.iterdir()}
    assert "note" not in lines[0]


@pytest.mark.parametrize("columns", ["120", "75", "60", "40"])
def test_no_word_of_the_list_is_broken_on_a_narrow_screen(tmp_path, capsys, monkeypatch, columns):
    begin(tmp_path / "a-run-of-many-words", note="a higher rate, and rows that are longer than before")
    finished(tmp_path / "one")
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["runs", "--runs", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    words = [word.strip(",") for line in lines for word in line.split()]
    assert {"a-run-of-many-words", "unfinished", "longer", "before", "method", "LoRA", "exact"} <= set(words)
    assert max(map(len, lines)) <= int(columns)


def test_what_a_run_leaves_that_failed_before_its_first_step_is_removed(tmp_path, capsys):
    data = tmp_path / "short.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n')
    where = [f"output.dir={tmp_path}", "output.name=none", f"data.train_path={data}", "model.max_seq_len=2"]
    where += ["model.name=builtin:tiny"]  # the demo trains its own first, for a minute
    assert main(["train", "--config", "configs/demo.yaml", *where]) == 3
    assert (tmp_path / "none" / ".lock").is_file()
    command = ["runs", "--json", "remove", "none", "--yes", "--runs", str(tmp_path)]
    (tmp_path / "none" / "mine.txt").write_text("")
    assert main(command) == 2 and "lacks one of them" in capsys.readouterr().err
    (tmp_path / "none" / "mine.txt").unlink()
    assert main(command) == 0
    (removed,) = json.loads(capsys.readouterr().out)
    assert removed["name"] == "none" and removed["removed_bytes"] and not (tmp_path / "none").exists()


def test_runs_are_removed_with_yes_alone_and_nothing_else_is(tmp_path, capsys, monkeypatch):
    for name in ("one", "two", "three"):
        finished(tmp_path / name)
    (tmp_path / "one" / "link").symlink_to(tmp_path / "two")
    command = ["runs", "remove", "one", "two", "--runs", str(tmp_path)]
    assert main(command) == 2 and "add CONFIRM=1" in capsys.readouterr().err
    with monkeypatch.context() as alone:
        alone.delenv("SFT_PLAY_MAKE")
        assert main(command) == 2 and "add --yes" in capsys.readouterr().err
    assert (tmp_path / "one").is_dir()
    (tmp_path / "two" / "plan.json").unlink()
    assert main([*command, "--yes"]) == 2 and "lacks one of them" in capsys.readouterr().err
    assert (tmp_path / "one").is_dir()  # all or none
    assert main(["runs", "--runs", str(tmp_path), "--yes", "--", "remove", "one"]) == 0  # as make runs
    assert sorted(path.name for path in tmp_path.iterdir()) == ["three", "two"]
    assert "removed" in capsys.readouterr().out and read_json(RunDir(tmp_path / "two").summary)


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("none", 8, "does not exist; the latest runs beside it: one"),
        ("../runs/one", 2, "is not the name of a run"),
        (".", 2, "is not the name of a run"),
        ("link", 2, "is a symbolic link"),
        ("elsewhere", 7, "may be running on node7: remove it there"),
    ],
)
def test_what_is_no_run_or_may_be_running_elsewhere_is_not_removed(tmp_path, capsys, name, code, words):
    folder = tmp_path / "runs"
    finished(folder / "one")
    (folder / "link").symlink_to(folder / "one")
    if name == "elsewhere":
        (begin(folder / name).path / ".lock").write_text("process 1 on node7")
    assert main(["runs", "remove", name, "--yes", "--runs", str(folder)]) == code
    assert words in capsys.readouterr().err and RunDir(folder / "one").summary.is_file()


def test_a_run_that_a_process_has_is_not_removed(tmp_path, capsys):
    run = finished(tmp_path / "one")
    with held(run):
        assert main(["runs", "remove", "one", "--yes", "--runs", str(tmp_path)]) == 7
    assert "so it is not removed; end it first" in capsys.readouterr().err and run.summary.is_file()
