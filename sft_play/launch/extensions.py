"""DeepSpeed compiles an extension at its first launch, behind a lock file that a killed process leaves behind for ever."""

import contextlib
import os
import time
from pathlib import Path

import psutil

BUILD_BEGINS_WITHIN_S = 30  # between the lock and the compiler that works beside it


def extensions_folder() -> Path:
    """Where PyTorch keeps extensions that it compiled (torch.utils.cpp_extension)."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions").expanduser()


def clear_abandoned_locks(folder: Path) -> list[Path]:
    """Removes locks of builds that nobody works on, so that the next launch does not wait for them; returns those removed.

    A build runs ninja in the lock's own folder; a young lock is left alone, since its build may not have begun.
    """
    removed = []
    for lock in [*folder.glob("*/lock"), *folder.glob("*/*/lock")]:
        with contextlib.suppress(OSError):
            if time.time() - lock.stat().st_mtime > BUILD_BEGINS_WITHIN_S and not _someone_works_in(lock.parent):
                lock.unlink()
                removed.append(lock)
    return removed


def _someone_works_in(folder: Path) -> bool:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if Path(process.cwd()) == folder.resolve():
                return True
    return False
