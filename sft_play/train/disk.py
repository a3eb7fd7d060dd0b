"""Explains errors of the disk while checkpoints are written, such as a full disk."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sft_play.errors import SftPlayError, StorageError
from sft_play.runlog import RunDir

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
GONE = {errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.ESTALE, errno.EXDEV}
# In the messages of torch.save when a write fails; they do not give the reason.
TORCH_SAVE = ("PytorchStreamWriter failed", "unexpected pos", "cannot be opened", "Parent directory")


@contextmanager
def disk_errors_explained(run: RunDir) -> Iterator[None]:
    """Turns what the libraries raise when a write fails into a clear message.

    Raises:
        StorageError: a write in the block failed.
    """
    try:
        yield
    except SftPlayError:
        raise
    except Exception as error:  # tokenizers raises plain exceptions
        if not run.path.is_dir():
            raise StorageError(
                f"the run directory {run.path} was removed or can no longer be reached while the run was "
                "writing to it; nothing more can be saved. Run `make train` again"
            ) from error
        reason = write_failure(error, run.path)
        if reason is None:
            raise
        raise StorageError(
            f"cannot write to {run.path}: {reason}. Free space there, or make it writable, and continue from "
            f"the last checkpoint: {run.resume_command()}; or choose another output.dir"
        ) from error


def write_failure(error: Exception, folder: Path) -> str | None:
    """Why a write into `folder` failed; None if the error is about something else."""
    if isinstance(error, OSError):
        named = Path(str(error.filename)).absolute()
        ours = error.filename is not None and named.is_relative_to(folder.absolute())
        told = error.errno in FULL or (ours and error.errno in GONE)
        return os.strerror(error.errno) if told and error.errno else None
    number = re.search(r"os error (\d+)", str(error))  # of safetensors and tokenizers
    if number and int(number[1]) in FULL | GONE:
        return os.strerror(int(number[1]))
    return "a file could not be written" if any(words in str(error) for words in TORCH_SAVE) else None
