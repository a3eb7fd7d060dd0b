"""How PyTorch's allocator of GPU memory is set up: with segments that grow, where that is possible."""

import os
import platform

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is the older name


def has_expandable_segments() -> bool:
    """Whether the allocator of a process has them: as the user says, else unless it runs in WSL.

    There, some drivers refuse them (pytorch #192330).
    """
    own = [os.environ[name] for name in VARIABLES if name in os.environ]
    if not own:
        return "microsoft" not in platform.uname().release.lower()
    return any("expandable_segments:true" in setting.lower() for setting in own)


def set_allocator() -> None:
    """Has memory segments grow, unless a variable is set: PyTorch reads one of the two only."""
    if not set(VARIABLES) & os.environ.keys() and has_expandable_segments():
        os.environ[VARIABLES[1]] = "expandable_segments:True"
