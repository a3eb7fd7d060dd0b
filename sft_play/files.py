"""The one way to write a file: it appears whole, or what was there before stays."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


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
