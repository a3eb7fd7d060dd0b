"""How a function that takes a kernel's place in a trace reports the kernel's work."""

from abc import ABC, abstractmethod

import torch

from sft_play.upstream.torch import active_modes


class Counts(ABC):
    """What a mode is, too, under which kernels are counted that do not run."""

    @abstractmethod
    def kernel(self, kind: int, dtype: torch.dtype, m: float, n: float, k: float, moved: float) -> None:
        """Counts one that computes in this type; the others are as in `Work`."""


def counted(kind: int, like: torch.Tensor, m: float, n: float = 0, k: float = 0, moved: float = 0) -> None:
    """Reports the work of a kernel that does not run here to the active mode that counts, if there is one.

    `like` is a tensor of any shape, in the dtype that the kernel computes in; the others are as in `Work`.
    """
    for mode in reversed(active_modes()):
        if isinstance(mode, Counts):
            mode.kernel(kind, like.dtype, m, n, k, moved)
            return
