"""The runs of a folder, read again only when their files have changed."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sft_play.errors import CheckpointError
from sft_play.report.record import RunRecord, activity_of, read_run
from sft_play.runlog import RunDir

KEPT_RUNS = 500
# Their files change while a run goes on, and no page shows them.
NOT_SHOWN = ("log", "launcher", "report.html")
Value = TypeVar("Value")


class Recent:
    """The latest results of work that takes a while, by what they depend on."""

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


def version_of(path: Path) -> Version:
    """That of now; of a directory that is gone, one without files."""
    found = []
    try:
        for file in sorted(path.iterdir()):
            if not file.name.startswith(NOT_SHOWN) and file.is_file():
                found.append((file.name, file.stat().st_mtime_ns, file.stat().st_size))
    except OSError:  # something was moved just now: the next version will be another one
        found = []
    return Version(path, activity_of(RunDir(path)), tuple(found))


class RunsFolder:
    """Reads the runs of a folder."""

    def __init__(self, path: Path) -> None:
        self.path, self._records = path, Recent(KEPT_RUNS)

    def runs(self) -> list[RunRecord]:
        """All of them, the latest first."""
        versions = sorted(map(version_of, self._paths().values()), key=planned, reverse=True)
        found = [self.read(version) for version in versions]
        return [run for run in found if run is not None]

    def version(self, name: str) -> Version | None:
        """The run of a name; None if the folder has none."""
        path = self._paths().get(name)
        version = version_of(path) if path else None
        return version if version and self.read(version) else None

    def read(self, version: Version) -> RunRecord | None:
        """What it holds; None if it is not the directory of a run."""

        def read() -> RunRecord | None:
            try:
                return read_run(version.path)
            except (CheckpointError, OSError):
                return None

        return self._records.get(version, read)

    def _paths(self) -> dict[str, Path]:
        """The directories in the folder by their names, without links that lead out of it."""
        try:
            home = self.path.resolve()
            found = [path for path in self.path.iterdir() if not path.name.startswith(".")]
        except OSError:
            return {}
        return {path.name: path for path in found if path.is_dir() and path.resolve().parent == home}


def planned(version: Version) -> int:
    """When its plan was written, or else its latest file, since a run that only starts has no plan."""
    times = {name: changed for name, changed, _ in version.files}
    return times.get(RunDir(version.path).plan.name) or max(times.values(), default=0)
