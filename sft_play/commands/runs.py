"""`sft-play runs`: which runs a folder has, and removing some of them."""

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from sft_play.config.inputs import GIVEN
from sft_play.config.resolved import read_resolved
from sft_play.errors import CheckpointError, ConfigError, RunInUseError
from sft_play.files import storing
from sft_play.report.record import other_runs, runs_in
from sft_play.report.runs_page import RunRow, run_row
from sft_play.report.sound import read_sound
from sft_play.report.table import Table
from sft_play.runlog import RunDir, hold_run, read_json
from sft_play.spelling import make

COLUMNS = ("run", "model", "method", "status", "steps", "best score", "note")
BEFORE_STEPS = (
    ".lock*", ".plan*.json", "log*.txt", "launcher*.log", "ranks", "probe.json", "report.html", GIVEN,
    "checkpoints",
)  # fmt: skip
ENDED = ("done", "failed", "interrupted")


def rows_of(folder: Path) -> list[RunRow]:
    """The runs of a folder, the latest first."""
    return [run_row(read_sound(path)) for path in runs_in(folder)]


def as_json(rows: Sequence[RunRow]) -> list[dict[str, float | str | None]]:
    """Name, status, note, and what the list of runs in the studio shows, with numbers as they are."""
    return [
        {
            **{"name": row.name, "status": row.status, "note": row.note},
            **{re.sub(r"\W", "_", cell.column).lower(): _value(cell.order, cell.text) for cell in row.cells},
        }
        for row in rows
    ]


def _value(order: tuple[float, ...] | str | None, text: str) -> float | str | None:
    """A number as it is; a text; None if there is neither."""
    if isinstance(order, tuple) and len(order) == 1:
        return order[0]
    return None if order is None else text


def runs_table(rows: Sequence[RunRow]) -> Table:
    """A row for each run."""
    found = []
    for row in rows:
        cells = {"run": row.name, "status": row.status, "note": row.note}
        cells |= {cell.column: cell.text for cell in row.cells}
        found.append(tuple(cells[column] for column in COLUMNS))
    short = {} if any(row.note for row in rows) else {"note": None}
    return Table(COLUMNS, found, left=(0, 1, 2, 3, 5, 6), short=short)


def removable(names: Sequence[str], folder: Path) -> list[RunDir]:
    """The runs of these names in the folder.

    Raises:
        ConfigError: it is no name, a link, or the folder of something else.
        CheckpointError: there is no such run.
        RunInUseError: a process of another machine had it last, and it has not ended.
    """
    return [_removable(name, folder) for name in dict.fromkeys(names)]


def _removable(name: str, folder: Path) -> RunDir:
    run = RunDir(folder / name)
    if name in ("", ".", "..") or "/" in name:
        raise ConfigError(f"{name!r} is not the name of a run in {folder}; `{make('runs')}` lists them")
    if run.path.is_symlink():
        raise ConfigError(f"{run.path} is a symbolic link, so it is not removed")
    if not run.path.is_dir():
        raise CheckpointError(f"{run.path} does not exist{other_runs(folder)}")
    begun = run.plan.is_file() and "output.name" in read_resolved(run.config)
    if not begun and not _failed_to_begin(run):
        raise ConfigError(
            f"{run.path} is not removed: a run has written {run.config.name} and {run.plan.name} there, and "
            "this folder lacks one of them. If it can go, remove it yourself"
        )
    host = _holder(run).rpartition(" on ")[2]
    if host not in ("", os.uname().nodename) and read_json(run.summary).get("status") not in ENDED:
        raise RunInUseError(f"{run.path} may be running on {host}: remove it there")
    return run


def _failed_to_begin(run: RunDir) -> bool:
    """Whether a process had the folder, and all that is in it was written before the first step of a run."""
    left = [path for path in run.path.iterdir() if not any(map(path.match, BEFORE_STEPS))]
    return bool(_holder(run)) and not left and not any(run.checkpoints.glob("*"))


def _holder(run: RunDir) -> str:
    """Which process had the run last: "process 1 on node2"; "" if that is unknown."""
    try:
        return (run.path / ".lock").read_text(errors="replace").strip()
    except OSError:
        return ""


def size_of(run: RunDir) -> int:
    """Bytes of all files of a run."""
    return sum(path.lstat().st_size for path in run.path.rglob("*"))


def remove(run: RunDir) -> None:
    """Removes a run's folder and all that is in it.

    Raises:
        RunInUseError: a process has it.
        StorageError: a file cannot be removed.
    """
    gone = run.path.with_name(f".{run.path.name}.removed")  # no list shows it if this is interrupted
    with storing(run.path, "Make the folder writable"):
        try:
            with hold_run(run):  # nothing can begin in it meanwhile
                shutil.rmtree(gone, ignore_errors=True)
                run.path.rename(gone)
        except RunInUseError:
            by = _holder(run) or "another process"
            raise RunInUseError(f"{run.path} is in use by {by}, so it is not removed; end it first") from None
        shutil.rmtree(gone)
