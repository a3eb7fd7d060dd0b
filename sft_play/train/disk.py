"""Explains errors of the disk while checkpoints are written, such as a full disk."""

import errno
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from safetensors import SafetensorError

from sft_play.errors import StorageError
from sft_play.runlog import RunDir

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
# In the messages of torch.save when a write fails; they do not give the reason.
TORCH_SAVE = ("PytorchStreamWriter failed", "unexpected pos", "Parent directory")
GONE = {
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.EACCES,
    errno.EPERM,
}  # of a folder that could be written before


@contextmanager
def disk_errors_explained(run: RunDir, numbers: Collection[int] = frozenset(FULL)) -> Iterator[None]:
    """Turns what the libraries raise when a write fails into a clear message.

    Args:
        run: its run directory.
        numbers: errors of the operating system that are about the disk.

    Raises:
        StorageError: a write in the block failed.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = _reason(error, numbers)
        if reason is None:
            raise
        raise StorageError(
            f"cannot write to {run.path}: {reason}. Free space there, or make it writable, and run "
            "`make resume` to continue from the last checkpoint; or choose another output.dir"
        ) from error


def _reason(error: Exception, numbers: Collection[int]) -> str | None:
    """Why a write failed; None if the error is about something else."""
    if isinstance(error, OSError):
        return os.strerror(error.errno) if error.errno and error.errno in numbers else None
    number = re.search(r"os error (\d+)", str(error))
    if isinstance(error, SafetensorError) and number and int(number[1]) in numbers:
        return os.strerror(int(number[1]))
    return "a file could not be written" if any(words in str(error) for words in TORCH_SAVE) else None
