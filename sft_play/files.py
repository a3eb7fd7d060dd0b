"""How files are written, whole or not at all, and how those are read that others may have put there."""

import atexit
import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from sft_play.errors import StorageError

PART = 1 << 20  # bytes that are read at a time


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file for reading; OSError for anything else: a link, a pipe that waits, a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_whole(path: Path, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes; OSError if it is none or longer."""
    content = bytearray()
    with open_regular(path) as file:
        while part := file.read(PART):  # it would allocate what it is asked for, however short the file
            content += part
            if len(content) > most:
                raise OSError(errno.EFBIG, f"longer than {most:,} bytes", str(path))
    return bytes(content)


def write_atomic(path: Path, content: str | bytes, *, flush: bool = True) -> None:
    """Writes a file, in a folder that exists, whole or not at all; text as UTF-8.

    With `flush`, waits until the content is on the disk, so that it survives a power failure too.

    Raises:
        OSError: it cannot be written; what was there before is unchanged.
    """
    with replacing_file(path, flush=flush) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing_file(path: Path, *, flush: bool = True) -> Iterator[Path]:
    """Yields where to write a file that then replaces `path`, unless the block fails; raises OSError."""
    # Process ids are equal on machines that share a disk, and in containers often, so the name is random.
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        yield temporary
        if flush:
            flush_to_disk(temporary)
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def publish(complete: Path, target: Path) -> None:
    """Renames a complete folder to a name that nothing has, and flushes that to the disk; raises OSError."""
    complete.rename(target)
    flush_to_disk(target.parent)


def flush_to_disk(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk; OSError if they cannot be written."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def own_folder(prefix: str) -> Path:
    """A new folder that only this user can read or write, removed when the process ends."""
    folder = tempfile.mkdtemp(prefix=prefix)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@contextlib.contextmanager
def storing(path: Path, remedy: str) -> Iterator[None]:
    """Turns an OSError within into a StorageError: that the path cannot be written, and what to do."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}. {remedy}") from error
