"""Standard input, output and error, of which the work of a command is independent.

Output that cannot be written (a closed pipe, a full disk, a terminal that is gone) is dropped, and the log of
the run keeps it. Only if the output is all that a command makes, a full disk is an error.
"""

import contextlib
import io
import os
import select
import sys
from typing import Any, TextIO

from sft_play.errors import StorageError

LOG = 1  # while libraries are quiet, this descriptor is that of the log


class _Output(io.FileIO):
    """A file descriptor that can always be written to."""

    needed = False  # whether a write that fails is an error, unless nobody reads any more

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
            while written is None:  # the stream does not block, and its reader is slow
                select.select((), (self,), ())
                written = super().write(data)
            return written
        except OSError as error:
            if self.needed and not isinstance(error, BrokenPipeError):
                self.needed = False
                raise StorageError(f"standard output cannot be written: {error.strerror}") from error
        if self.fileno() > 2:
            with contextlib.suppress(OSError):
                os.write(LOG, data)
        return len(data)


def open_output(descriptor: int, *, line_buffering: bool = True, keep: bool = False) -> TextIO:
    """Text for a descriptor; what cannot be written is dropped, and what cannot be encoded is escaped.

    With `keep`, the descriptor stays open when the stream is closed.
    """
    raw = _Output(descriptor, "w", closefd=not keep)
    encoding = getattr(sys.__stdout__, "encoding", None)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=encoding, errors="backslashreplace", line_buffering=line_buffering
    )


def secure_streams() -> None:
    """Makes the standard streams of this process such that no command depends on them; call it first.

    A stream that was closed (`train >&-`) becomes /dev/null, before a file of the run takes its descriptor.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest descriptor that is free
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for as long as the process lives
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # `infer` says what is not UTF-8
    if sys.stdout is sys.__stdout__:
        sys.stdout = open_output(1, line_buffering=os.isatty(1), keep=True)
    if sys.stderr is sys.__stderr__:
        sys.stderr = open_output(2, keep=True)


def require_output() -> None:
    """Makes it an error if standard output cannot be written: it is all that the command makes."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(raw, _Output):
        raw.needed = True
