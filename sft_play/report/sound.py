"""Runs whose files hold other values than we write: pages and tables leave out these files, and say so."""

from itertools import chain
from pathlib import Path

from sft_play.report.choices import shown
from sft_play.report.record import FIELDS, OTHER_FORM, RunRecord, read_run
from sft_play.report.run_page import run_heading
from sft_play.report.runs_page import run_row


def read_sound(path: Path) -> RunRecord:
    """`read_run` without files whose values no page can show, such as texts for numbers; they are `damaged`.

    Raises:
        CheckpointError: as `read_run`.
    """
    run = read_run(path)
    fewest_left_out = chain([run], (run.without(name) for name in FIELDS), [run.without(*FIELDS)])
    return next(filter(_can_be_shown, fewest_left_out), run.without(*FIELDS))


def _can_be_shown(run: RunRecord) -> bool:
    """Whether what stands on each page of the run can be made; sections of its own page are guarded there."""
    try:
        return bool(run_row(run) and run_heading(run) and [shown(run, name) for name in ("", *run.settings)])
    except OTHER_FORM:
        return False
