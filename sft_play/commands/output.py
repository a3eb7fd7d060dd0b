"""Files and folders that a command writes: whole or not at all, and never over something else."""

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path

from sft_play.errors import ConfigError, RunInUseError, SftPlayError, StorageError
from sft_play.fingerprints import installed_versions
from sft_play.machine.host import existing_folder, free_bytes
from sft_play.manifest import replacing
from sft_play.spelling import make, var
from sft_play.units import format_bytes


def require_overwritable(output: Path, mark: str, target: str) -> None:
    """Raises ConfigError if a folder has content without `mark`, a file that only this make target writes."""
    if not output.exists():
        return
    if not output.is_dir() or (any(output.iterdir()) and not (output / mark).is_file()):
        raise ConfigError(
            f"{output} exists and was not written by `{make(target)}` (it has no {mark}), so it is not "
            f"overwritten. Remove it, or set {var(OUT='<another folder>')}"
        )


def require_own_file(output: Path, is_ours: Callable[[Path], bool], target: str, *, force: bool) -> None:
    """Raises ConfigError for a folder, and for a file that something else has written, unless `force`."""
    if not output.exists():
        return
    if not output.is_file():
        raise ConfigError(f"{var(OUT=output)} is not a file; set {var(OUT='<file>')}")
    if not force and output.stat().st_size and not is_ours(output):
        raise ConfigError(
            f"{var(OUT=output)} exists and was not written by `{make(target)}`, so it is not overwritten. "
            f"Set {var(OUT='<another file>')}, or add {var(FORCE=1)} to overwrite it"
        )


def require_space(output: Path, needed: int, what: str) -> None:
    """Raises StorageError unless the disk has room for `needed` bytes and a little more."""
    folder = existing_folder(output.absolute().parent)
    free = free_bytes(folder)
    if free < needed * 1.05:
        raise StorageError(
            f"{what} needs {format_bytes(needed)}, but {folder} has {format_bytes(free)} free. "
            f"Free some space, set {var(OUT='<folder>')}, or use a 16-bit {var(DTYPE=None)}"
        )


@contextlib.contextmanager
def _alone(output: Path) -> Iterator[None]:
    """Keeps other processes from writing `output`: they would write into the same unfinished folder."""
    lock = output.with_name(f".{output.name}.sft-play-lock")
    output.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunInUseError(
                f"another process is writing {output}; wait for it, or set {var(OUT='<another folder>')}"
            ) from None
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_output(output: Path) -> Iterator[Path]:
    """Yields a folder that replaces `output`, with a manifest, when complete.

    Raises:
        StorageError: it cannot be written.
        RunInUseError: another process is writing it.
    """
    try:
        with _alone(output), replacing(output, {"versions": installed_versions()}) as folder:
            yield folder
    except SftPlayError:
        raise
    except Exception as error:  # tokenizers raises plain exceptions
        from sft_play.train.disk import write_failure  # with torch, which some of these commands do without

        reason = write_failure(error, output.parent)
        if reason is None:
            raise
        raise StorageError(
            f"cannot write {output}: {reason}. Free some space, or set {var(OUT='<folder>')}"
        ) from error
