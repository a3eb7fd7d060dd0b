"""What a CPU's kernels allocate inside that no operation returns: casts of operands, unpacked weights.

A GPU's kernels read each operand in its own type. Scratch memory of oneDNN's products is not known here: it
depends on the processor and on the number of threads.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch

from sft_play.sizing.fake import NF4_BLOCK
from sft_play.sizing.recorder import counted
from sft_play.work import PRODUCT, UNPACK

MIXING = frozenset(
    getattr(torch.ops.aten, name + place).Tensor
    for name, place in product(("add", "sub", "mul", "div"), ("", "_"))
)


def cast_operands(func: Any, args: Sequence[Any]) -> list[torch.Tensor]:
    """The copies that an elementwise kernel makes of operands in another type than the one it computes in.

    They live as long as the kernel runs (`TensorIteratorBase::compute_types`). A result in another type,
    which only an operation in place has, is computed in a copy too.

    Returns:
        Tensors of the operands' shapes; none for other operations.
    """
    operands = [value for value in args if isinstance(value, torch.Tensor)]
    if func not in MIXING or len(operands) < 2 or operands[0].dtype == operands[1].dtype:
        return []
    common = torch.result_type(*operands)
    copied = [each for each in operands if each.dtype != common]
    if func.__name__.split(".")[0].endswith("_") and operands[0].dtype != common:
        copied.append(operands[0])
    return [torch.empty(each.shape, dtype=common) for each in copied]


def four_bit_product(
    a: torch.Tensor, shape: Sequence[int], *, nested: bool, autocast: torch.dtype | None
) -> torch.Tensor:
    """The product of bitsandbytes on a CPU, which unpacks all scales, then the weight, and multiplies.

    Args:
        a: [..., in_features].
        shape: (out_features, in_features) of the unpacked weight.
        nested: whether the scales are quantized themselves.
        autocast: the type of the autocast around it, which casts the operands of the product inside.

    Returns:
        [..., out_features].
    """
    weights = shape[0] * shape[1]
    counted(UNPACK, a, weights, moved=weights * (0.5 + a.dtype.itemsize))
    counted(PRODUCT, a, a.numel() // a.shape[-1], shape[0], a.shape[-1])
    if nested:
        unpacked = torch.empty(-(-weights // NF4_BLOCK), dtype=torch.float32)
        scales = torch.empty_like(unpacked)  # noqa: F841 - with their mean; lives until this returns
        del unpacked
    kept = [torch.empty(tuple(shape), dtype=a.dtype)]
    dtype = autocast or a.dtype
    if dtype != a.dtype:
        kept += [torch.empty(tuple(shape), dtype=dtype), torch.empty(a.shape, dtype=dtype)]
    return a.new_empty((*a.shape[:-1], shape[0]), dtype=dtype)
