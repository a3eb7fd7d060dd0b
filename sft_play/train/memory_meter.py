"""Measures the device memory that training itself uses, and frees what it no longer does."""

import gc
import re
from dataclasses import dataclass
from pathlib import Path

import torch

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class MemoryMeter:
    """Peak memory since the meter was started.

    On a GPU, what the allocator held; on a CPU, how far resident memory rose. There, memory of interpreter
    and libraries that was resident before is not counted; pages that they touch later are.
    """

    device: str
    resident_before: int = 0

    @classmethod
    def start(cls, device: str) -> "MemoryMeter":
        """Resets the peak and starts measuring."""
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            return cls(device)
        if CLEAR_REFS.exists():
            CLEAR_REFS.write_text("5")  # resets the peak (proc(5)); without it an earlier peak counts
        return cls(device, _status_bytes("VmRSS"))

    def peak_bytes(self) -> int:
        """The peak since the start."""
        if self.device == "cuda":
            return torch.cuda.max_memory_allocated()
        return max(0, _status_bytes("VmHWM") - self.resident_before)


def release_unreferenced(device: str) -> None:
    """Frees what nothing refers to any more, on "cuda" also for other processes."""
    gc.collect()
    if device == "cuda" and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _status_bytes(name: str) -> int:
    """A size of this process from /proc; 0 if there is none (not Linux)."""
    match = re.search(rf"^{name}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE) if STATUS.exists() else None
    return int(match[1]) * 1024 if match else 0
