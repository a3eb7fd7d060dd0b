"""`report` and `compare` on the command line: what they print, and their exit codes."""

import os

import pytest

from sft_play import cli
from sft_play.commands.report import try_report
from sft_play.report import html
from tests.unit.report.written_run import finished, no_plots  # noqa: F401

pytestmark = pytest.mark.usefixtures("no_plots")


def test_report_says_where_the_page_is(tmp_path, capfd):
    run = finished(tmp_path / "one")
    assert cli.main(["report", "one", "--runs", str(tmp_path)]) == 0
    assert capfd.readouterr().out.split() == ["wrote", str(run.report)] and run.report.is_file()


def test_without_a_name_the_latest_run_is_reported(tmp_path, capfd):
    for age, name in enumerate(("new", "old")):
        os.utime(finished(tmp_path / name).plan, (1e9 - age, 1e9 - age))
    assert cli.main(["report", "--runs", str(tmp_path)]) == 0
    assert (tmp_path / "new" / "report.html").is_file() and not (tmp_path / "old" / "report.html").exists()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["report", "nope"], 8, "nope does not exist; the latest runs beside it: one"),
        (["report", "empty"], 8, "empty is not the directory of a run; the latest runs beside it: one"),
        (["report", "x/y/z"], 8, "x/y/z does not exist; run `make train` first"),
        (["compare", "one"], 2, "two or more runs"),
        (["compare", "one", "one"], 2, "one is named more than once"),
        (["compare", "one", "nope"], 8, "nope does not exist"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, capfd, words, code, message):
    finished(tmp_path / "one")
    (tmp_path / "empty").mkdir()
    assert cli.main([*words, "--runs", str(tmp_path)]) == code
    error = capfd.readouterr().err
    assert message in error and error.count("\n") == 1 and "bug" not in error


def test_a_folder_without_runs_is_a_sentence_too(tmp_path, capfd):
    assert cli.main(["report", "--runs", str(tmp_path / "none")]) == 8
    assert "there are no runs in" in capfd.readouterr().err


def test_a_report_that_fails_does_not_fail_the_run(tmp_path, monkeypatch, capsys):
    def fail(page, path):
        raise MemoryError("no memory")

    run = finished(tmp_path / "one")
    assert try_report(run) == {"report": run.report}
    monkeypatch.setattr(html, "write_page", fail)
    assert try_report(run) == {}
    said = " ".join(capsys.readouterr().out.split())
    assert said == f"the report could not be written: no memory; try `make report RUN={run.path}`"
