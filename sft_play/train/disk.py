"""A disk that is full, while checkpoints are written."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError

from sft_play.errors import StorageError
from sft_play.runlog import RunDir

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
TORCH_SAVE = ("PytorchStreamWriter failed", "unexpected pos")  # what torch.save says when a write fails, without the reason


@contextmanager
def disk_errors_explained(run: RunDir) -> Iterator[None]:
    """Turns what the libraries raise when a write fails into one sentence.

    Raises:
        StorageError: a write in the block failed.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = _reason(error)
        if reason is None:
            raise
        raise StorageError(
            f"cannot write into {run.path}: {reason}. Free space or choose output.dir; `make resume` goes on from the last "
            "checkpoint that is whole. Smaller ones: train.keep_checkpoints=1"
        ) from error


def _reason(error: Exception) -> str | None:
    """Why a write failed; None if the error is about something else."""
    if isinstance(error, OSError):
        return os.strerror(error.errno) if error.errno in FULL else None
    number = re.search(r"os error (\d+)", str(error))
    if isinstance(error, SafetensorError) and number and int(number[1]) in FULL:
        return os.strerror(int(number[1]))
    return "a file could not be written whole" if any(words in str(error) for words in TORCH_SAVE) else None
