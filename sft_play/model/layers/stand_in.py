"""How a function that takes a kernel's place in a trace reports the kernel's work."""

from abc import abstractmethod

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack


class Counts(TorchDispatchMode):
    """A mode under which kernels are counted that do not run."""

    @abstractmethod
    def kernel(self, kind: int, dtype: torch.dtype, m: float, n: float, k: float, moved: float) -> None:
        """Counts one that computes in this type; the others are as in `Work`."""


def counted(kind: int, like: torch.Tensor, m: float, n: float = 0, k: float = 0, moved: float = 0) -> None:
    """Reports the work of a kernel that does not run here to the active mode that counts, if there is one.

    `like` is a tensor of any shape, in the dtype that the kernel computes in; the others are as in `Work`.
    """
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if isinstance(mode, Counts):
            mode.kernel(kind, like.dtype, m, n, k, moved)
            return
