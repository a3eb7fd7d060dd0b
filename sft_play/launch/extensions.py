"""Removes stale locks of DeepSpeed's extension build, which would block every later launch forever."""

import contextlib
import os
import time
from pathlib import Path

import psutil

BUILD_BEGINS_WITHIN_S = 30  # the most time between the creation of the lock and the start of the compiler


def extensions_folder() -> Path:
    """Where PyTorch stores compiled extensions (torch.utils.cpp_extension)."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions").expanduser()


def clear_abandoned_locks(folder: Path) -> list[Path]:
    """Removes the locks of builds whose process was killed; returns the removed files.

    A build runs ninja in the folder of its lock, so a lock is stale if no process has that working directory.
    A recent lock is kept, since its build may not have started yet.
    """
    removed = []
    for lock in [*folder.glob("*/lock"), *folder.glob("*/*/lock")]:
        with contextlib.suppress(OSError):
            is_old = time.time() - lock.stat().st_mtime > BUILD_BEGINS_WITHIN_S
            if is_old and not _is_working_directory(lock.parent):
                lock.unlink()
                removed.append(lock)
    return removed


def _is_working_directory(folder: Path) -> bool:
    """Whether some process has this working directory."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if Path(process.cwd()) == folder.resolve():
                return True
    return False
