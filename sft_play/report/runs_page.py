"""The list of runs: what each is doing or how it ended, and its most important numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

from sft_play.report.html import Page
from sft_play.report.record import RunRecord
from sft_play.report.run_page import progress_line, status_word, tokens_per_second
from sft_play.report.tables import MISSING, formatted
from sft_play.units import counted, format_bytes

TEMPLATE = "runs.html.j2"
LOSS = "{:.4f}".format


@dataclass(frozen=True)
class RunRow:
    """A run in the list; all but the share of its steps are texts."""

    name: str
    status: str
    progress: str  # the step and the time left of a run that is running
    share: float | None  # of the steps that are done; None if it is not running
    cells: Sequence[tuple[str, str]]  # what a number is, and its text


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
    return RunRow(run.name, status_word(run), progress_line(run) if running else "", share, cells)


def runs_page(runs: Sequence[RunRecord], folder: str) -> tuple[Page, list[RunRow]]:
    """The page and its rows; the runs that something works on come first."""
    active = [run for run in runs if run.activity]
    ordered = [*active, *(run for run in runs if not run.activity)]
    said = f"{counted(len(runs), 'run')} in {folder}, {len(active) or 'none'} of them running"
    page = Page("Runs", said if runs else f"There are no runs in {folder} yet", [])
    return page, [run_row(run) for run in ordered]
