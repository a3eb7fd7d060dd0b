"""The list of runs: what each is doing or how it ended, and its most important numbers."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from sft_play.report.html import Page
from sft_play.report.record import RunRecord
from sft_play.report.run_page import progress_line, status_word, tokens_per_second
from sft_play.report.tables import MISSING, formatted
from sft_play.secrets import redact
from sft_play.units import counted, format_bytes

TEMPLATE, ROW = "runs.html.j2", "runs_row.html.j2"
LOSS = "{:.4f}".format
NOT_UTF8 = "its name is not UTF-8: rename the folder to open it"


@dataclass(frozen=True)
class RunRow:
    """A run in the list; all but the share of its steps are texts."""

    name: str
    address: str  # of its page; "" if it can have none
    status: str
    progress: str  # the step and the time left of a run that is running
    share: float | None  # of the steps that are done; None if it is not running
    cells: Sequence[tuple[str, str]]  # what a number is, and its text
    active: bool  # whether something works on it


def run_row(run: RunRecord) -> RunRow:
    """The row of a run."""
    running = run.activity == "running"
    share = run.last_step / run.total_steps if running and run.total_steps else None
    measured = run.summary.get("measured_peak_bytes")
    if running:  # on a CPU the process's memory is seen, which is not what is predicted
        measured = run.latest("memory/peak_bytes") if run.chosen.get("device") == "cuda" else None
    cells = (
        ("steps", f"{run.last_step:,}"),
        ("training loss", formatted(run.latest("train/loss"), LOSS)),
        ("held-out loss", formatted(run.latest("eval/loss"), LOSS)),
        ("tokens/s", formatted(tokens_per_second(run), "{:,.0f}".format)),
        ("memory, predicted", formatted(run.predicted_peak_bytes, format_bytes)),
        ("memory, measured", formatted(measured, lambda size: format_bytes(int(size)))),
        ("started", str(run.environment.get("started") or MISSING)),
    )
    name, status = os.fsencode(run.name).decode(errors="backslashreplace"), [status_word(run)]
    own_name = name == run.name
    status += [f"cannot be read: {', '.join(run.damaged)}"] if run.damaged else []
    status += [] if own_name else [NOT_UTF8]
    address = f"/runs/{quote(redact(name))}" if own_name else ""
    progress = progress_line(run) if running else ""
    return RunRow(name, address, "; ".join(status), progress, share, cells, bool(run.activity))


def runs_page(rows: Sequence[RunRow], folder: str) -> Page:
    """The page, whose rows come beside it."""
    active = sum(row.active for row in rows)
    said = f"{counted(len(rows), 'run')} in {folder}, {active or 'none'} of them running"
    return Page("Runs", said if rows else f"There are no runs in {folder} yet", [])
