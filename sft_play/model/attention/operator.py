"""Attention over joined rows as one operator of PyTorch's, so that a compiled layer is one graph.

The compiler does not look into an operator. Where rows begin and how long the longest one is are tensors for
it, of which it knows neither values nor sizes, so that one graph serves all micro-batches. On a GPU the
operator is PyTorch's own (`varlen_attn`). It has none for a CPU: ours calls the fused kernel for each row, as
without compilation, and tells the compiler the shapes of results and how gradients are computed.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, library
from torch.nn.attention.varlen import varlen_attn

from sft_play.model.attention.varlen import GROUPED, kernel_dtype, offsets_of, takes_one_call
from sft_play.upstream.torch import cpu_attention, cpu_attention_gradients, mark_dynamic

Offsets = Sequence[int]  # where rows begin, and the last one ends


class Rows:
    """The joined rows of a micro-batch, as a compiled layer gets them.

    `offsets`, [rows + 1], are where they begin, and the last one ends: never one element, which would be a
    constant for the compiler. `longest` has as many elements as the longest row has tokens, and no memory: a
    size is a number that may change. `lengths` are for attention outside of graphs.
    """

    def __init__(self, lengths: tuple[int, ...], device: torch.device) -> None:
        self.lengths = lengths
        self.offsets = offsets_of(lengths, device)
        self.longest = torch.empty(1).expand(max(2, *lengths))  # one element would be a constant too
        mark_dynamic(self.offsets, 0)
        mark_dynamic(self.longest, 0)


@lru_cache(maxsize=1)  # all layers ask for those of one micro-batch
def rows_of(lengths: tuple[int, ...], device: torch.device) -> Rows:
    """The rows of these lengths, joined on a device."""
    return Rows(lengths, device)


def on_cpu(tensor: Tensor) -> bool:
    """Whether a tensor is in RAM, for whose attention PyTorch has no operator."""
    return tensor.device.type == "cpu"


def serves(query: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether an operator computes attention of a query, [1, heads, tokens, head_dim], over joined rows."""
    if on_cpu(query):
        return value.shape[-1] == query.shape[-1] and not dropout
    return takes_one_call(query, value, dropout)


def attend_joined(
    query: Tensor, key: Tensor, value: Tensor, rows: Rows, window: int | None, scale: float | None
) -> Tensor:
    """Causal attention within each of the joined rows, in a graph; arguments as of `varlen_sdpa`.

    Query is [1, heads, tokens, head_dim], key and value are [1, key_value_heads, tokens, head_dim]; the
    result is [1, tokens, heads, head_dim].
    """
    dtype = kernel_dtype(query)
    query, key, value = (tensor.to(dtype)[0].transpose(0, 1) for tensor in (query, key, value))
    if on_cpu(query):
        return _on_cpu(query, key, value, rows.offsets, window, scale)[0][None]
    longest, offsets = rows.longest.shape[0], rows.offsets
    # a window that is longer than all rows is the kernel's to see: asking here would make it two graphs
    out: Any = varlen_attn(
        query, key, value, offsets, offsets, longest, longest,
        scale=scale, window_size=(-1 if window is None else window - 1, 0), **GROUPED,
    )  # fmt: skip
    return out[None]


def _each_row(tensors: Sequence[Tensor], offsets: Offsets) -> Iterator[list[Tensor]]:
    """Of tensors of [tokens, heads, head_dim] those of each row, as [1, heads, tokens, head_dim]."""
    for begin, end in itertools.pairwise(offsets):
        yield [tensor[begin:end].transpose(0, 1)[None] for tensor in tensors]


def _band(query: Tensor, window: int | None) -> Tensor | None:
    """What is added to the scores of a row, [tokens, tokens], if its window is shorter than it is."""
    tokens = query.shape[2]
    if window is None or window >= tokens:
        return None
    position = torch.arange(tokens)
    distance = position[:, None] - position
    return query.new_zeros(tokens, tokens).masked_fill_((distance < 0) | (distance >= window), -torch.inf)


def _joined(rows: Sequence[Tensor]) -> Tensor:
    """Rows of [1, heads, tokens, head_dim] end to end, [tokens, heads, head_dim]."""
    return torch.cat([row[0].transpose(0, 1) for row in rows])


def attend_rows(
    query: Tensor, key: Tensor, value: Tensor, offsets: Offsets, window: int | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """The output, as the query, and logarithms of the sums of exponentials, [heads, tokens]."""
    rows = _each_row((query, key, value), offsets)
    found = (cpu_attention(q, k, v, _band(q, window), scale) for q, k, v in rows)
    outs, sums = zip(*found, strict=True)
    return _joined(outs), torch.cat([each[0] for each in sums], 1)


def gradients_of_rows(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    offsets: Offsets,
    window: int | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, [tokens, heads, head_dim]."""
    rows = _each_row((grad, query, key, value, out, sums.T[..., None]), offsets)
    found = [
        cpu_attention_gradients(g, q, k, v, o, lse[..., 0], _band(q, window), scale)
        for g, q, k, v, o, lse in rows
    ]
    d_query, d_key, d_value = map(_joined, zip(*found, strict=True))
    return d_query, d_key, d_value


@library.custom_op("sft_play::attend_joined", mutates_args=(), device_types="cpu")
def _on_cpu(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, window: int | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    return attend_rows(query, key, value, offsets.tolist(), window, scale)


@library.custom_op("sft_play::attend_joined_backward", mutates_args=(), device_types="cpu")
def _gradients_on_cpu(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    offsets: Tensor,
    window: int | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    tensors = grad, query, key, value, out, sums
    return gradients_of_rows(*tensors, offsets.tolist(), window, scale)


@_on_cpu.register_fake
def _(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[1::-1], dtype=torch.float32)


@_gradients_on_cpu.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, ...]:
    return tuple(each.new_empty(each.shape) for each in (query, key, value))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    query, key, value, offsets, out, sums = ctx.saved_tensors
    tensors = grad, query, key, value, out, sums, offsets
    return *_gradients_on_cpu(*tensors, ctx.window, ctx.scale), None, None, None


_on_cpu.register_autograd(_backward, setup_context=_keep)
