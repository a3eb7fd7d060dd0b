"""A run that does not get to its end leaves its error and a report, and its error stays what it was."""

import pytest

from sft_play.commands.report import end_reported
from sft_play.errors import Interrupted, StorageError
from sft_play.report import html
from sft_play.runlog import RunDir, read_json, update_summary
from tests.unit.report.written_run import begin, finish, finished, make_settings, no_plots, train  # noqa: F401

pytestmark = pytest.mark.usefixtures("no_plots")


def end(run: RunDir, error: Exception, work=lambda run: None, *, here: bool = True) -> None:
    """A run that does some work and then fails."""
    with pytest.raises(type(error)) as raised, end_reported(run, make_settings("one"), here=here):
        work(run)
        raise error
    assert raised.value is error


def trained(run: RunDir) -> None:
    """What is there when the weights are saved and the answers are not."""
    finish(train(begin(run.path)))
    update_summary(run, status="trained", trained=True)


def test_a_run_that_fails_half_way_says_so_in_its_summary_and_report(tmp_path):
    run = RunDir(tmp_path / "one")
    end(run, StorageError("the disk is full"), lambda run: train(begin(run.path), steps=7))
    assert read_json(run.summary) == {"status": "failed", "error": "the disk is full", "trained": False}
    assert "Failed: the disk is full. 7 of 20 steps recorded" in run.report.read_text()


def test_what_fails_before_the_run_begins_leaves_the_earlier_run_as_it_is(tmp_path):
    run = finished(tmp_path / "one")
    before = {path: path.read_bytes() for path in run.path.iterdir()}
    end(run, StorageError("no room for a checkpoint"))
    assert {path: path.read_bytes() for path in run.path.iterdir()} == before


def test_a_resumed_run_that_fails_is_not_done_any_more(tmp_path):
    run = finished(tmp_path / "one")
    end(run, ValueError(), lambda run: run.write_json(run.plan, read_json(run.plan)))
    summary = read_json(run.summary)
    assert (summary["status"], summary["error"]) == ("failed", "ValueError")


def test_a_command_that_fails_after_training_is_not_done_but_its_run_is_trained(tmp_path):
    run = RunDir(tmp_path / "one")
    end(run, ValueError("no answers"), trained)
    summary = read_json(run.summary)
    assert (summary["status"], summary["error"], summary["trained"]) == ("failed", "no answers", True)
    page = run.report.read_text()
    assert "Trained, but a later stage failed: no answers." in page and "make infer" in page


def test_ctrl_c_after_training_leaves_a_trained_run_that_is_not_done(tmp_path):
    run = RunDir(tmp_path / "one")
    with pytest.raises(KeyboardInterrupt, match="stopped after training; the weights are saved"):
        with end_reported(run, make_settings("one"), here=True):
            trained(run)
            raise KeyboardInterrupt("stopped")
    assert read_json(run.summary)["status"] == "interrupted" and "make resume" not in run.report.read_text()


def test_ctrl_c_that_says_nothing_is_named_and_so_are_the_commands_of_this_run(tmp_path):
    run = RunDir(tmp_path / "one")
    said = (
        f"^stopped by SIGINT after training; .*`make eval RUN={run.typed}` and `make infer RUN={run.typed}`"
    )
    with pytest.raises(KeyboardInterrupt, match=said), end_reported(run, make_settings("one"), here=True):
        trained(run)
        raise KeyboardInterrupt


def test_ctrl_c_before_the_first_checkpoint_names_the_command_that_starts_this_run_again(tmp_path):
    run = RunDir(tmp_path / "one")
    said = f"^stopped before the first checkpoint. Start again with: make resume RUN={run.typed}$"
    with pytest.raises(KeyboardInterrupt, match=said), end_reported(run, make_settings("one"), here=True):
        begin(run.path)
        raise KeyboardInterrupt("stopped")


def test_an_earlier_run_that_was_trained_does_not_make_this_one_so(tmp_path):
    run = RunDir(tmp_path / "one")
    trained(run)
    end(run, ValueError("no memory"), lambda run: run.write_json(run.plan, read_json(run.plan)))
    assert read_json(run.summary)["trained"] is False and "Failed: no memory." in run.report.read_text()


def test_an_interrupted_run_has_a_report_and_keeps_its_summary(tmp_path):
    run = train(begin(tmp_path / "one"), steps=7)
    run.write_json(run.summary, {"status": "interrupted"})
    end(run, Interrupted("stopped"))
    assert read_json(run.summary) == {"status": "interrupted"} and "make resume" in run.report.read_text()


def test_another_machine_writes_nothing(tmp_path):
    run = RunDir(tmp_path / "one")
    end(run, ValueError("x"), lambda run: begin(run.path), here=False)
    assert not run.summary.exists() and not run.report.exists()


def test_a_report_that_fails_too_does_not_hide_the_error(tmp_path, monkeypatch, capsys):
    def fail(page, path):
        raise MemoryError("no memory")

    def begin_badly(run):
        begin(run.path)
        run.summary.mkdir()  # so that it cannot be written

    monkeypatch.setattr(html, "write_page", fail)
    run = RunDir(tmp_path / "one")
    end(run, StorageError("the disk is full"), begin_badly)
    assert "the report could not be written: no memory" in " ".join(capsys.readouterr().out.split())
