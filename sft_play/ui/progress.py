"""Live lines for work that takes a while; they print nothing if the output is not a terminal.

rich would also redirect sys.stdout and sys.stderr to its console, bypassing `quiet_libraries`; that is
disabled.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from sft_play.ui.console import console

LIBRARIES = "loading PyTorch and transformers"
LOADING = "loading the weights"
PLANNING = "planning: tracing training steps"

_described: list[Callable[[str], None]] = []  # what changes the text of each live line, the innermost last


def _progress(*columns: Any) -> Progress:
    return Progress(
        *columns,
        console=console(),
        transient=True,
        disable=not console().is_terminal,
        redirect_stdout=False,
        redirect_stderr=False,
    )


@contextlib.contextmanager
def progress_bar(description: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A transient progress bar; call the yielded function with the number of finished rows."""
    columns = TextColumn("  {task.description}", markup=False), BarColumn(32), MofNCompleteColumn()
    with _progress(*columns, TimeRemainingColumn()) as progress:
        task = progress.add_task(description.strip(), total=total)
        with _describing(progress, task):
            yield lambda rows: progress.advance(task, rows)


@contextlib.contextmanager
def spinner(description: str) -> Iterator[None]:
    """A transient line with the elapsed time, for work without a known length."""
    columns = TextColumn(" "), SpinnerColumn(), TextColumn("{task.description}", markup=False)
    with _progress(*columns, TimeElapsedColumn()) as progress:
        with _describing(progress, progress.add_task(description.strip(), total=None)):
            yield


@contextlib.contextmanager
def _describing(progress: Progress, task: TaskID) -> Iterator[None]:
    _described.append(lambda text: progress.update(task, description=text))
    try:
        yield
    finally:
        _described.pop()


def describe(text: str) -> None:
    """Says on the live line, if there is one, what is being done now."""
    if _described:
        _described[-1](text)
