"""The runs of a folder, read again only when their files have changed."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from markupsafe import Markup

from sft_play.errors import CheckpointError
from sft_play.report.html import render_part
from sft_play.report.record import RunRecord, activity_of
from sft_play.report.runs_page import ROW, RunRow, run_row
from sft_play.report.sound import read_sound
from sft_play.runlog import RunDir

KEPT_RUNS = 32  # whole, for their pages; of all others, the row of the list is kept
# Their files change while a run goes on, and no page shows them.
NOT_SHOWN = ("log", "launcher", "report.html")
Value = TypeVar("Value")


class Recent:
    """The latest results of work that takes a while, by what they depend on; for one thread at a time."""

    def __init__(self, most: int) -> None:
        self._most, self._found = most, OrderedDict[Hashable, Any]()

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The result for a key; it is made if it is not here."""
        if key not in self._found:
            self._found[key] = make()
            if len(self._found) > self._most:
                self._found.popitem(last=False)
        self._found.move_to_end(key)
        return self._found[key]


@dataclass(frozen=True)
class Version:
    """A run directory at a moment: what its page depends on."""

    path: Path
    activity: str
    files: tuple[tuple[str, int, int], ...]  # name, time of the last change, size


LOCK = ".lock"


def version_of(path: Path, known: Version | None = None) -> Version:
    """That of now; of a directory that is gone, one without files.

    Whoever works on a run has written its lock: where that is as in a `known` version in which nothing worked
    on the run, nobody is looked for, which takes longer than all the rest.
    """
    found = []
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if not entry.name.startswith(NOT_SHOWN) and entry.is_file():
                    status = entry.stat()
                    found.append((entry.name, status.st_mtime_ns, status.st_size))
    except OSError:  # something was moved just now: the next version will be another one
        found = []
    files = tuple(sorted(found))
    idle = known is not None and not known.activity and _lock_in(known.files) == _lock_in(files)
    return Version(path, "" if idle else activity_of(RunDir(path)), files)


def _lock_in(files: tuple[tuple[str, int, int], ...]) -> tuple[str, int, int] | None:
    return next((file for file in files if file[0] == LOCK), None)


def _read(version: Version) -> RunRecord | None:
    try:
        return read_sound(version.path)
    except (CheckpointError, OSError):
        return None


@dataclass(frozen=True)
class _Listed:
    """The row of a run in the list, and the same as HTML; None of a directory that is not that of a run."""

    version: Version
    planned: int
    row: tuple[RunRow, Markup] | None


def _listed(version: Version) -> _Listed:
    run = _read(version)
    row = run_row(run) if run else None
    return _Listed(version, planned(version), (row, render_part(ROW, row=row)) if row else None)


class RunsFolder:
    """Reads the runs of a folder. Rows of the list may be asked for beside anything else."""

    def __init__(self, path: Path) -> None:
        self.path, self._records = path, Recent(KEPT_RUNS)
        self._rows: dict[Path, _Listed] = {}
        self._listing = threading.Lock()

    def rows(self) -> list[tuple[RunRow, Markup]]:
        """Those of all runs: first what something works on, then the latest."""
        with self._listing:  # the first list of many runs takes a while, and a page asks again meanwhile
            kept, self._rows = self._rows, {}
            for path in self._paths().values():
                known = kept.get(path)
                version = version_of(path, known.version if known else None)
                self._rows[path] = known if known and known.version == version else _listed(version)
            ordered = sorted(self._rows.values(), key=lambda one: one.planned, reverse=True)
        found = [one.row for one in ordered if one.row]
        return sorted(found, key=lambda row: not row[0].active)

    def version(self, name: str) -> Version | None:
        """The run of a name; None if the folder has none."""
        path = self._paths().get(name)
        version = version_of(path) if path else None
        return version if version and self.read(version) else None

    def read(self, version: Version) -> RunRecord | None:
        """What it holds; None if it is not the directory of a run."""
        return self._records.get(version, lambda: _read(version))

    def _paths(self) -> dict[str, Path]:
        """The directories in the folder by their names, without links that lead out of it."""
        try:
            home = self.path.resolve()
            with os.scandir(self.path) as entries:
                found = [entry for entry in entries if entry.name[0] != "." and entry.is_dir()]
        except OSError:
            return {}
        paths = {entry.name: self.path / entry.name for entry in found}
        linked = {entry.name for entry in found if entry.is_symlink()}
        return {
            name: path for name, path in paths.items() if name not in linked or path.resolve().parent == home
        }


def planned(version: Version) -> int:
    """When its plan was written, or else its latest file, since a run that only starts has no plan."""
    times = {name: changed for name, changed, _ in version.files}
    return times.get(RunDir(version.path).plan.name) or max(times.values(), default=0)
