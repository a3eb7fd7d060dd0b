"""Files and folders that a command writes: whole or not at all, and never over something else."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from sft_play.errors import ConfigError, SftPlayError, StorageError
from sft_play.fingerprints import installed_versions
from sft_play.machine.host import existing_folder, free_bytes
from sft_play.manifest import replacing
from sft_play.train.disk import write_failure
from sft_play.units import format_bytes


def require_overwritable(output: Path, mark: str, target: str) -> None:
    """Checks that a folder may be replaced; `mark` is a file that only this make target writes.

    Raises:
        ConfigError: the folder has other content.
    """
    if not output.exists():
        return
    if not output.is_dir() or (any(output.iterdir()) and not (output / mark).is_file()):
        raise ConfigError(
            f"{output} exists and was not written by `make {target}` (it has no {mark}), so it is not "
            "overwritten. Remove it, or set OUT=<another folder>"
        )


def require_own_file(output: Path, is_ours: Callable[[Path], bool], target: str, *, force: bool) -> None:
    """Checks that a file may be replaced: one that this make target has written, or any with `force`.

    Raises:
        ConfigError: it is a folder or a device, or a file that something else has written.
    """
    if not output.exists():
        return
    if not output.is_file():
        raise ConfigError(f"OUT={output} is not a file; set OUT=<file>")
    if not force and output.stat().st_size and not is_ours(output):
        raise ConfigError(
            f"OUT={output} exists and was not written by `make {target}`, so it is not overwritten. Set "
            "OUT=<another file>, or add FORCE=1 to overwrite it"
        )


def require_space(output: Path, needed: int, what: str) -> None:
    """Raises StorageError unless the disk has room for `needed` bytes and a little more."""
    folder = existing_folder(output.absolute().parent)
    free = free_bytes(folder)
    if free < needed * 1.05:
        raise StorageError(
            f"{what} needs {format_bytes(needed)}, but {folder} has {format_bytes(free)} free. "
            "Free some space, set OUT=<folder>, or use a 16-bit DTYPE"
        )


@contextlib.contextmanager
def replacing_output(output: Path) -> Iterator[Path]:
    """Yields a temporary folder that replaces `output`, with a manifest, once it is complete.

    Raises:
        StorageError: the folder cannot be written.
    """
    try:
        with replacing(output, {"versions": installed_versions()}) as folder:
            yield folder
    except SftPlayError:
        raise
    except Exception as error:  # tokenizers raises plain exceptions
        reason = write_failure(error, output.parent)
        if reason is None:
            raise
        raise StorageError(
            f"cannot write {output}: {reason}. Free some space, or set OUT=<folder>"
        ) from error
