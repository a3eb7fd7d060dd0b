"""Progress bars and spinners; they print nothing if the output is not a terminal.

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
    TextColumn,
    TimeRemainingColumn,
)

from sft_play.runlog import console


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
def progress_bar(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """A transient progress bar; call the yielded function with the number of finished rows."""
    with _progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    ) as progress:
        task = progress.add_task(description, total=total)
        yield lambda rows: progress.advance(task, rows)


@contextlib.contextmanager
def spinner(description: str) -> Iterator[None]:
    """A transient spinner for work without a known length."""
    with _progress(SpinnerColumn(), TextColumn("{task.description}", markup=False)) as progress:
        progress.add_task(description, total=None)
        yield
