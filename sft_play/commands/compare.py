"""`make compare`: several runs side by side on one web page."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sft_play.commands.output import require_own_file
from sft_play.commands.report import read_and_say
from sft_play.errors import ConfigError
from sft_play.report.compare_page import compare_page
from sft_play.report.html import is_page, write_page
from sft_play.report.plots import COLOURS
from sft_play.report.record import RunRecord, find_run
from sft_play.spelling import make


def compare_command(
    names: Sequence[str], folder: Path, output: Path | None = None, *, force: bool = False
) -> tuple[list[RunRecord], Path]:
    """Writes the page, by default beside the first run, and returns the runs and its path.

    The names are those of runs within `folder`, or paths. With `force`, any file is overwritten.

    Raises:
        ConfigError: fewer than two names, too many, or one twice; the file is not ours.
        CheckpointError: a run does not exist.
        StorageError: the page cannot be written.
    """
    paths = [find_run(name, folder) for name in names]
    _require_several(names, paths)
    found = [read_and_say(path) for path in paths]
    counts = Counter(run.name for run in found)
    # runs of the same name in different folders are called as they were typed
    runs = [
        replace(run, name=name) if counts[run.name] > 1 else run
        for run, name in zip(found, names, strict=True)
    ]
    target = output or paths[0].parent / "compare.html"
    require_own_file(target, is_page, "compare", force=force)
    write_page(compare_page(runs), target)
    return runs, target


def _require_several(names: Sequence[str], paths: Sequence[Path]) -> None:
    """Raises ConfigError for fewer than two names, too many, or one twice."""
    counts = Counter(path.resolve() for path in paths)
    twice = [name for name, path in zip(names, paths, strict=True) if counts[path.resolve()] > 1]
    if twice:
        raise ConfigError(f"{twice[0]} is named more than once; name each run once")
    if len(names) < 2:
        found = f"one was named: {names[0]}. For a single run: {make('report', RUN=names[0])}"
        raise ConfigError(f"comparing takes two or more runs, {found}")
    if len(names) > COLOURS:
        raise ConfigError(f"{len(names)} runs were named; at most {COLOURS} fit on one page")
