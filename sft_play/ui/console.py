"""The console of a person.

Libraries print a lot. While a command runs, their output goes to log.txt, at the level of file descriptors so
that C++ code is included, and only what `console()` prints reaches the terminal.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.file_proxy import FileProxy

from sft_play.cache import cache_dir, project_dir
from sft_play.files import storing
from sft_play.secrets import redact, redact_file
from sft_play.ui.screen import Screen
from sft_play.ui.streams import open_output

_console: Console | None = None
_quiet = False  # whether a `quiet_libraries` block is running


def console() -> Console:
    """The user's console. On ranks above 0 it prints nothing; with --json it writes to stderr."""
    global _console
    if _console is None:
        _console = Screen()
    return _console


def set_console(value: Console | None) -> None:
    """Replaces the console (None: back to standard output)."""
    global _console
    _console = value


def warn(text: str) -> None:
    """Prints a line that asks for attention to the user's console, indented below what a command does.

    Errors of libraries are quoted in such lines, so secrets are masked.
    """
    console().print(redact(f"  {text}"), style="yellow")


@contextlib.contextmanager
def console_on_stderr() -> Iterator[None]:
    """Within it the console writes to stderr: stdout is left to JSON."""
    before = _console
    set_console(Screen(stderr=True))
    try:
        yield
    finally:
        set_console(before)


@contextlib.contextmanager
def printing_aloud() -> Iterator[None]:
    """In the block, what a function of the user prints is shown by the console, also with quiet libraries."""
    shown = FileProxy(console(), sys.stdout)
    with contextlib.redirect_stdout(shown):
        yield
    shown.flush()


@contextlib.contextmanager
def quiet_libraries(log: Path, *, silent: bool = False) -> Iterator[None]:
    """Redirects everything that is not printed by `console()` to `log` within this context.

    At the end, access tokens in the log are overwritten. SFT_PLAY_VERBOSE=1 turns all this off. With `silent`
    (ranks above 0) the console prints nothing either. A console that was set before (for --json) keeps its
    stream. Nested contexts have no effect.

    Raises:
        StorageError: the log cannot be written.
    """
    global _quiet
    if os.environ.get("SFT_PLAY_VERBOSE") == "1" or _quiet:
        yield
        return
    elsewhere = "copy the run to another folder and set output.dir=<folder>"
    if any(log.is_relative_to(folder) for folder in (project_dir(), cache_dir())):
        elsewhere = "set SFT_PLAY_CACHE=<another folder>"
    remedy = f"Make {log.parent} writable, or {elsewhere}"
    with storing(log, remedy):
        log.parent.mkdir(parents=True, exist_ok=True)
        sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    before = _console
    sys.stdout.flush()
    sys.stderr.flush()
    saved = {fd: os.dup(fd) for fd in (1, 2)}
    target = 2 if before is not None and before.file is sys.stderr else 1
    person = open_output(os.open(os.devnull, os.O_WRONLY) if silent else os.dup(target))
    set_console(Screen(file=person, force_terminal=os.isatty(saved[target]) or None))
    for fd in saved:
        os.dup2(sink, fd)
    os.close(sink)
    logging.captureWarnings(True)
    _quiet = True
    try:
        yield
    finally:
        _quiet = False
        logging.captureWarnings(False)
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, original in saved.items():
            os.dup2(original, fd)
            os.close(original)
        set_console(before)
        person.close()
        redact_file(log)
