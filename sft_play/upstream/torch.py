"""What we change in PyTorch, and take of its private parts."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

from sft_play.upstream.patching import patched


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


@contextmanager
def dividing_integers() -> Iterator[None]:
    """In the block, FSDP2 divides weights of integers, as 4-bit ones are; torch 2.11 fails at them."""
    from torch import nn
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    def parameter(data: Any, requires_grad: bool = True) -> nn.Parameter:
        return nn.Parameter(data, requires_grad and (data.is_floating_point() or data.is_complex()))

    with patched(_fsdp_param, "nn", SimpleNamespace(**vars(nn) | {"Parameter": parameter})):
        yield


def wait_for_ranks(seconds: int) -> None:
    """Lets this launcher wait so long for ranks that it ends; torch 2.11 knows no variable for that."""
    from torch.distributed.elastic.multiprocessing.api import PContext

    PContext.close.__defaults__ = (None, seconds)


def is_view(tensor: Any) -> bool:
    """Whether a tensor is a view for autograd, which copies the gradient of one that is changed in place."""
    return tensor._is_view()


def keep_busy(cycles: int) -> None:
    """Lets a GPU wait, so that operations are in its queue when it is done."""
    import torch

    torch.cuda._sleep(cycles)
