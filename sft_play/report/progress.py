"""What moves on the screen while one waits: nothing where the output is not a terminal."""

import contextlib
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sft_play.runlog import console


@contextlib.contextmanager
def progress_bar(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar that is gone afterwards; call the value with the rows that are done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(), transient=True, disable=not console().is_terminal) as progress:
        task = progress.add_task(description, total=total)
        yield lambda rows: progress.advance(task, rows)


@contextlib.contextmanager
def spinner(description: str) -> Iterator[None]:
    """A sign of life for work without a count."""
    if not console().is_terminal:
        yield
        return
    with console().status(description):
        yield
