"""Runs side by side: what differs, and nothing else."""

import io
import json
import os

import pytest
from rich.console import Console

from sft_play.commands.compare import compare_command
from sft_play.commands.report import write_report
from sft_play.errors import CheckpointError, ConfigError
from sft_play.report.compare_page import _difference, _judged, compare_table
from sft_play.report.record import read_run
from sft_play.report.run_page import KeyNumber, key_numbers
from sft_play.runlog import update_summary
from sft_play.ui.screen import Screen
from tests.unit.report.test_run_page import section
from tests.unit.report.written_run import begin, finished, no_plots, train  # noqa: F401

pytestmark = pytest.mark.usefixtures("no_plots")


def compared(folder, *names) -> str:
    return compare_command(names, folder)[1].read_text()


def test_only_settings_that_differ_are_listed(tmp_path):
    finished(tmp_path / "one", seed=1)
    finished(tmp_path / "two", seed=2)
    text = section(compared(tmp_path, "one", "two"), "settings")
    assert "train.seed 1 2" in text and text.count("train.") == 1


def test_equal_runs_say_so(tmp_path):
    finished(tmp_path / "one")
    finished(tmp_path / "two")
    assert "All settings are the same." in compared(tmp_path, "one", "two")


def test_key_numbers_that_are_the_same_are_folded(tmp_path):
    finished(tmp_path / "one")
    finished(tmp_path / "two", world_size=2)
    shown, _, folded = section(compared(tmp_path, "one", "two"), "numbers").partition("that are the same")
    assert "tokens/s 1,000 2,000 +100.0%, better" in shown and "training loss" not in shown
    assert "training loss 0.5000" in folded and "tokens/s" not in folded


@pytest.mark.parametrize(
    ("name", "first", "other", "said"),
    [
        ("loss, after", 2.0, 1.0, "-50.0%, better"),
        ("step, measured", 2.0, 3.0, "+50.0%, worse"),
        ("tokens/s", 2.0, 1.0, "-50.0%, worse"),
        ("exact match, after", 2.0, 3.0, "+50.0%, better"),
        ("loss, before", 2.0, 1.0, "-50.0%"),
        ("effective batch", 2.0, 1.0, "-50.0%"),
        ("tokens/s", 2.0, 2.0, "same"),
        ("tokens/s", 2.0, None, ""),
    ],
)
def test_a_difference_says_whether_it_is_better(name, first, other, said):
    numbers = (KeyNumber(name, str(value), value) for value in (first, other))
    assert _judged(*numbers) == said


def test_other_data_behind_the_same_name_is_a_difference(tmp_path):
    finished(tmp_path / "one")
    run = finished(tmp_path / "two")
    run.data.write_text('{"fingerprint": "other"}')
    assert "fingerprint of the data abc123 other" in section(compared(tmp_path, "one", "two"), "settings")


def test_a_half_done_run_is_compared_by_what_it_has(tmp_path):
    finished(tmp_path / "one")
    train(begin(tmp_path / "half", learning_rate=2e-3), steps=7)
    page = compared(tmp_path, "one", "half")
    assert "status done unfinished" in section(page, "numbers") and "steps 20 7" in section(page, "numbers")
    assert "train.learning_rate 0.001 0.002" in section(page, "settings")


def test_runs_on_other_numbers_of_processes_get_a_table_of_their_speed_up(tmp_path):
    finished(tmp_path / "one")
    finished(tmp_path / "two", world_size=2)
    assert "two 2 2,000 2.00x 100%" in section(compared(tmp_path, "two", "one"), "scaling")


def test_speed_is_not_compared_between_runs_of_other_models_methods_or_data(tmp_path):
    for name, world in (("one", 1), ("two", 2), ("four", 4), ("eight", 8)):
        finished(tmp_path / name, world_size=world)
    (tmp_path / "two" / "data.json").write_text('{"fingerprint": "other"}')
    config = tmp_path / "four" / "config.resolved.yaml"
    config.write_text(config.read_text().replace('mode: "lora"', 'mode: "full"'))
    assert 'id="scaling"' not in compared(tmp_path, "one", "two", "four")
    text = section(compared(tmp_path, "one", "two", "four", "eight"), "scaling")
    assert "one 1 1,000 1.00x 100% eight 8 8,000 8.00x 100% Speed-up over one" in text


def test_runs_of_the_same_name_are_told_apart_by_their_folders(tmp_path):
    for folder in ("a", "b"):
        finished(tmp_path / folder / "one")
    paths = [str(tmp_path / folder / "one") for folder in ("a", "b")]
    runs, target = compare_command(paths, tmp_path, tmp_path / "out.html")
    assert [run.name for run in runs] == paths and target == tmp_path / "out.html"


def test_a_file_that_is_no_page_of_ours_is_overwritten_only_by_force(tmp_path):
    for name in ("one", "two"):
        finished(tmp_path / name)
    target = compare_command(["one", "two"], tmp_path)[1]
    assert compare_command(["one", "two"], tmp_path)[1] == target
    target.write_text("precious")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="not written by `make compare`.*FORCE=1"):
        compare_command(["one", "two"], tmp_path, target)
    with pytest.raises(ConfigError, match="is not a file"):
        compare_command(["one", "two"], tmp_path, pipe, force=True)
    assert target.read_text() == "precious"
    compare_command(["one", "two"], tmp_path, target, force=True)
    assert "precious" not in target.read_text()


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["one"], "two or more runs, one was named: one. For a single run: make report RUN=one"),
        (["one", "two", "./one"], "is named more than once"),
        ([str(number) for number in range(9)], "9 runs were named; at most 8"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_sentence(tmp_path, monkeypatch, names, words):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        finished(tmp_path / name)
    with pytest.raises(ConfigError, match=words):
        compare_command(names, tmp_path)
    assert not (tmp_path / "compare.html").exists()


def test_a_run_that_is_not_there_is_named_with_those_that_are(tmp_path):
    finished(tmp_path / "one")
    with pytest.raises(CheckpointError, match="nope does not exist; the latest runs beside it: one"):
        compare_command(["one", "nope"], tmp_path)


@pytest.mark.parametrize("name", ["summary.json", "plan.json"])
@pytest.mark.parametrize("value", ["NaN", "9" * 400, '"text"', '{"a": 1}'])
def test_wrong_values_in_a_file_end_no_report_and_no_comparison(tmp_path, capsys, name, value):
    for run in ("one", "two"):
        finished(tmp_path / run)
    keys = json.loads((tmp_path / "two" / name).read_text())
    (tmp_path / "two" / name).write_text("{" + ", ".join(f'"{key}": {value}' for key in keys) + "}")
    runs, page = compare_command(["one", "two"], tmp_path)
    assert "Key numbers" in page.read_text() and "two" in write_report(tmp_path / "two").read_text()
    Screen(file=io.StringIO()).print(compare_table(runs))
    said = f"two: damaged and omitted: {name}"
    assert (said in capsys.readouterr().out) == (name in runs[1].damaged)


def test_a_file_that_is_left_out_is_named_on_the_console(tmp_path, capsys):
    for run in ("one", "two"):
        finished(tmp_path / run)
    (tmp_path / "two" / "plan.json").write_text('{"plan": {"sequence_ranks": "x", "world_size": 2}}')
    compare_command(["one", "two"], tmp_path)
    write_report(tmp_path / "two")
    assert capsys.readouterr().out.count("two: damaged and omitted: plan.json") == 2


def test_the_console_table_has_a_row_for_each_run_and_fits_80_columns(tmp_path):
    for name in ("one", "two"):
        finished(tmp_path / name)
    screen = Console(file=io.StringIO(), width=80)
    screen.print(compare_table(compare_command(["one", "two"], tmp_path)[0]))
    lines = [line.split() for line in screen.file.getvalue().splitlines()]
    assert ["one", "done", "20", "2.0000", "0.7500", "1.01", "GiB", "1,000", "600", "ms"] in lines


def test_only_the_names_are_wrapped_in_the_console_table(tmp_path):
    name = "a-name-of-twenty-five-long"
    for each in (name, "two"):
        finished(tmp_path / each)
    screen = Console(file=io.StringIO(), width=72)
    screen.print(compare_table(compare_command([name, "two"], tmp_path)[0]))
    assert all(text in screen.file.getvalue() for text in (" done ", "1.01 GiB", "600 ms"))


def test_two_runs_have_a_column_of_differences_and_curves_come_first(tmp_path):
    finished(tmp_path / "one")
    finished(tmp_path / "two", world_size=2)
    page = compared(tmp_path, "one", "two")
    assert page.index('id="curves"') < page.index('id="numbers"') < page.index('id="settings"')
    text = section(page, "numbers")
    assert "one two difference" in text and "tokens/s 1,000 2,000 +100.0%" in text
    assert "steps 20" in text.partition("that are the same in all runs")[2]


@pytest.mark.parametrize(
    ("first", "other", "text"),
    [
        (0.15, 0.85, "+70.0 points"),
        (0.0, 0.5, "+50.0 points"),
        (2.0, 1.5, "-25.0%"),
        (0.0141, 0.3927, "28 times"),
        (1.0, 3.7e37, "3.7e+37 times"),
        (2.0, 2.0, "same"),
        (0.0, 2.0, ""),
        (2.0, None, ""),
    ],
)
def test_differences_read_as_people_say_them(first, other, text):
    percent = text.endswith("points")
    numbers = [KeyNumber("x", f"{value}%" if percent else f"{value}", value) for value in (first, other)]
    assert _difference(*numbers) == text


def test_what_only_one_run_has_stands_where_it_has_it(tmp_path):
    finished(tmp_path / "one")
    run = finished(tmp_path / "two")
    summary = json.loads(run.summary.read_text())
    run.summary.write_text(json.dumps(summary | {"predicted_memory_origin": "earlier run"}))
    text = section(compared(tmp_path, "one", "two"), "numbers")
    places = [text.index(f"peak memory, {name}") for name in ("predicted", "from an earlier run", "measured")]
    assert places == sorted(places)


def test_more_runs_are_each_compared_with_the_first(tmp_path):
    for name, world in (("one", 1), ("two", 2), ("four", 4)):
        finished(tmp_path / name, world_size=world)
    text = section(compared(tmp_path, "one", "two", "four"), "numbers")
    assert "two difference from one four difference from one" in text
    assert "tokens/s 1,000 2,000 +100.0%, better 4,000 +300.0%, better" in text


def test_the_time_of_a_part_of_a_run_is_shown_and_not_compared(tmp_path):
    run = finished(tmp_path / "one")
    update_summary(run, resumed_step=8)
    (found,) = [number for number in key_numbers(read_run(run.path)) if number.name == "training time"]
    assert found == KeyNumber("training time", "12.0 s from step 8 on", None)
