"""What we change in PyTorch, and take of its private parts."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """In the block, attention never runs in cuDNN, which PyTorch 2.13 prefers on capability 9 and 10.

    It builds a plan for every new length of a sequence, which takes the CPU tens of milliseconds, and its
    workspace is known only to cuDNN, so its memory could not be predicted. What makes this unnecessary: plans
    that serve several lengths.
    """
    import torch

    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def compiling_layers(variants: int) -> AbstractContextManager[None]:
    """In the block, the compiler leaves layers whole at the buckets of DDP, and compiles so many variants.

    These are settings of the process; `torch.compile` has none for a function alone (2.13).
    """
    import torch

    return torch._dynamo.config.patch(optimize_ddp=False, recompile_limit=variants)


def is_view(tensor: Any) -> bool:
    """Whether a tensor is a view for autograd, which copies the gradient of one that is changed in place."""
    return tensor._is_view()


def keep_busy(cycles: int) -> None:
    """Lets a GPU wait, so that operations are in its queue when it is done."""
    import torch

    torch.cuda._sleep(cycles)
