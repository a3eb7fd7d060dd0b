"""What a CPU's kernels allocate inside that no operation returns: casts, unpacked weights, blocks of scores.

A GPU's kernels read each operand in its own type. What products take depends on the processor
(sizing/meters/product_scratch.py).
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch

from sft_play.model.attention.varlen import type_name
from sft_play.model.layers.stand_in import counted
from sft_play.model.weights.four_bit import NF4_BLOCK
from sft_play.sizing.meters.product_scratch import Product, Rules, ScratchRule
from sft_play.units import SIXTEEN_BIT
from sft_play.work import PRODUCT, UNPACK

MIXING = frozenset(
    getattr(torch.ops.aten, name + place).Tensor
    for name, place in product(("add", "sub", "mul", "div"), ("", "_"))
)
# Of attention, after FlashAttentionKernel.cpp: queries in a block of scores, by the least length of sequences
# that has so many, and keys in it.
QUERY_BLOCKS, KEY_BLOCK = ((768, 256), (192, 64), (0, 32)), 512


def cast_operands(func: Callable[..., Any], *args: object) -> list[torch.Tensor]:
    """The copies that an elementwise kernel makes of operands in another type than the one it computes in.

    They live as long as the kernel runs (`TensorIteratorBase::compute_types`). A result in another type,
    which only an operation in place has, is computed in a copy too.
    """
    operands = [value for value in args if isinstance(value, torch.Tensor)]
    if len(operands) < 2 or operands[0].dtype == operands[1].dtype:
        return []
    common = torch.result_type(*operands)
    copied = [each for each in operands if each.dtype != common]
    if func.__name__.split(".")[0].endswith("_") and operands[0].dtype != common:
        copied.append(operands[0])
    return [torch.empty(each.shape, dtype=common) for each in copied]


def _score_block(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int]:
    tokens = query.shape[2]
    block = next(queries for least, queries in QUERY_BLOCKS if tokens >= least)
    return min(block, tokens), min(KEY_BLOCK, key.shape[2])


def attention_blocks(threads: int, query: torch.Tensor, key: torch.Tensor, *_: object) -> list[torch.Tensor]:
    """What each thread has of scores, their maxima and sums, and of results, while attention runs.

    Query and key are [batch, heads, tokens, head_dim]. Scores are in fp32, and again in the query's type.
    """
    queries, keys = _score_block(query, key)
    own = torch.empty((threads, queries * (keys + 2 + query.shape[-1])), dtype=torch.float32)
    return [own, *_in_own_type(query, threads * queries * keys)]


def attention_gradient_blocks(
    threads: int, grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *_: object
) -> list[torch.Tensor]:
    """The same in the backward pass: of scores and of their gradients, and the row sums that a block needs.

    The gradient, [batch, heads, tokens, head_dim], is copied if tokens do not lie in front of heads.
    """
    queries, keys = _score_block(query, key)
    sizes = (threads * 2 * queries * keys, min(threads, query.shape[0] * query.shape[1]) * queries)
    own = [torch.empty(size, dtype=torch.float32) for size in sizes]
    copied = [] if grad.transpose(1, 2).is_contiguous() else [torch.empty_like(grad)]
    return [*own, *_in_own_type(query, sizes[0]), *copied]


def _in_own_type(query: torch.Tensor, size: int) -> list[torch.Tensor]:
    return [torch.empty(size, dtype=query.dtype)] if query.dtype.itemsize < 4 else []


def masked_rows(scores: torch.Tensor, dim: int, *_: object) -> list[torch.Tensor]:
    """What the math kernel's softmax of scores of any shape needs to find rows that are masked everywhere.

    After `_safe_softmax` in PyTorch's attention.cpp, whose result takes the place of the plain softmax.
    """
    masked = torch.empty(scores.shape, dtype=torch.bool)
    return [masked, masked.all(dim, keepdim=True), torch.empty((), dtype=scores.dtype)]


def scratch_of_products(rule: ScratchRule, threads: int, *args: object) -> list[torch.Tensor]:
    """What products of 16-bit numbers take; the last two arguments are [..., m, k] and [..., k, n]."""
    first, second = [each for each in args if isinstance(each, torch.Tensor)][-2:]
    if type_name(first.dtype) not in SIXTEEN_BIT:
        return []
    batch = first.shape[0] if first.dim() == 3 else 1
    sizes = Product(first.shape[-2], first.shape[-1], second.shape[-1], batch)
    return [torch.empty(rule.bytes(sizes.at_a_time(threads)), dtype=torch.uint8)]


def inside_kernels(threads: int, scratch: Rules = ()) -> dict[Any, Callable[..., list[torch.Tensor]]]:
    """What operations allocate on a CPU's threads while they run, as functions of their arguments."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    products = {
        getattr(getattr(torch.ops.aten, name), overload): partial(scratch_of_products, rule, threads)
        for name, rule in scratch
        for overload in ("default", "out")
    }
    return {
        **{func: partial(cast_operands, func) for func in MIXING},
        torch.ops.aten._safe_softmax.default: masked_rows,
        attention: partial(attention_blocks, threads),
        backward: partial(attention_gradient_blocks, threads),
        **products,
    }


def four_bit_product(
    a: torch.Tensor, shape: Sequence[int], *, nested: bool, autocast: torch.dtype | None, scratch: Rules
) -> torch.Tensor:
    """The product of bitsandbytes on a CPU, which unpacks all scales, then the weight, and multiplies.

    From [..., in_features] to [..., out_features]; `shape` is that of the unpacked weight, whose scales are
    quantized themselves if it is nested. The autocast around it casts the operands of the product inside.
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
    rule = dict(scratch).get("mm")
    if rule and type_name(dtype) in SIXTEEN_BIT:
        sizes = Product(a.numel() // a.shape[-1], a.shape[-1], shape[0])
        kept.append(torch.empty(rule.bytes(sizes), dtype=torch.uint8))
    return a.new_empty((*a.shape[:-1], shape[0]), dtype=dtype)
