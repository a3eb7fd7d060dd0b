"""A driver of NVIDIA GPUs that are not here, as a module `pynvml` for the PYTHONPATH of a command."""

from pathlib import Path

MODULE = """
from types import SimpleNamespace

FREE = {free}  # GiB of each GPU

class NVMLError(Exception): pass
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return len(FREE)
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetName(index): return "NVIDIA L4"
def nvmlDeviceGetMemoryInfo(index): return SimpleNamespace(total=23034 << 20, free=FREE[index] << 30)
def nvmlDeviceGetCudaComputeCapability(index): return 8, 9
def nvmlSystemGetDriverVersion(): return "550.54.14"
"""


def write_driver(folder: Path, *free: int) -> None:
    """Writes it into a folder, of L4s with so many GiB free."""
    (folder / "pynvml.py").write_text(MODULE.format(free=free))
