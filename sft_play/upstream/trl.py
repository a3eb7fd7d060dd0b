"""What we change in TRL, and take of its private parts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from sft_play.upstream.patching import patched


def add_fused_head(model: Any, function: object) -> None:
    """Gives a causal language model TRL's fused output head (since 1.15), which computes with this function.

    `function.apply` takes the arguments of its kernel, with supervised tokens alone on any device. TRL's own
    trainers in this process keep its kernel: the head is made by the same code over other globals. What makes
    this unnecessary: the kernel as an argument of `add_fused_lm_head`.
    """
    from trl.trainer.utils import add_fused_lm_head

    ours = {"_ChunkedLogProbFunction": function, "_use_triton": lambda device: True}
    add = FunctionType(add_fused_lm_head.__code__, {**add_fused_lm_head.__globals__, **ours})
    add(model, temperature=1.0, cast_lm_head_to_fp32=False, outputs=("log_probs", "is_top1"))


@contextmanager
def head_computed_by(
    forward: Callable[..., Any], backward: Callable[..., Any], add_product: Callable[..., Any]
) -> Iterator[None]:
    """In the block, TRL's fused output head calls these functions in the place of its kernels.

    A trace has no GPU that they could run on (1.16). What makes this unnecessary: kernels that are operators
    of PyTorch's, with a fake implementation.
    """
    from trl.kernels import chunked_logprob

    with (
        patched(chunked_logprob, "_forward_tile", forward),
        patched(chunked_logprob, "_backward_tile", backward),
        patched(chunked_logprob, "_addmm_fp32", add_product),
    ):
        yield
