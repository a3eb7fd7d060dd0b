"""Describes what an operation of a step computes and moves, as a row of `sft_play.work.Work`.

FLOPs follow from the sizes of products as in torch.utils.flop_counter; bytes are those of all arguments and
results, unless an operation touches only a part of them (gathers) or none (views).
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from sft_play.timeline import WHOLE_MODEL, LayersDiffer, Segment, sweeps
from sft_play.upstream.torch import schema_of
from sft_play.work import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    ATTENTION,
    ATTENTION_BACKWARD,
    DTYPES,
    ELEMENTWISE,
    FREE,
    IN_PLACE,
    PRODUCT,
    REDUCE_SCATTER,
    TRANSCENDENTAL,
    UNPACK,
)

# (kind, dtype, m, n, k, times, bytes), with sizes and bytes of one of the times; None: no operation at all
Description = tuple[int, int, float, float, float, float, float] | None

DTYPE_INDEX = {getattr(torch, name): index for index, name in enumerate(DTYPES)}
QUESTIONS = ("prim", "profiler")  # namespaces that compute nothing
ALLOCATIONS = frozenset(["empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"])
VIEWS = frozenset(["detach", "alias", "_unsafe_view", "lift_fresh", "_reshape_alias"])
# These write their result and read no more than that.
GATHERS = frozenset(["embedding", "index_select", "gather", "index", "slice_backward", "select_backward"])
SCATTERS = frozenset(
    ["index_put", "index_put_", "_index_put_impl_", "scatter_add_", "index_add_", "index_add"]
)
CURVED = frozenset([
    "exp", "log", "pow", "rsqrt", "sqrt", "tanh", "sigmoid", "silu", "silu_backward", "gelu", "gelu_backward",
    "cos", "sin", "softplus", "erf", "_softmax", "_log_softmax", "bernoulli_", "native_dropout",
    "tanh_backward", "_softmax_backward_data", "logsumexp",
])  # fmt: skip


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements of a tensor of any shape."""
    return tensor.numel() * tensor.dtype.itemsize


def _all_bytes(values: Any) -> int:
    """Bytes of the tensors among the values, including those in lists."""
    total = 0
    for value in values:
        if isinstance(value, torch.Tensor):
            total += nbytes(value)
        elif isinstance(value, (list, tuple)):
            total += _all_bytes(value)
    return total


def _dtype(tensor: torch.Tensor) -> int:
    return DTYPE_INDEX.get(tensor.dtype, 0)


def _product(first: int) -> Callable:
    """The rule of a matrix product or a batch of them; its factors are argument `first` and the next one."""

    def describe(args: Sequence[Any], out: object) -> Description:
        a, b = args[first], args[first + 1]
        times = a.shape[0] if a.dim() == 3 else 1
        sizes = a.shape[-2], b.shape[-1], a.shape[-1]
        return PRODUCT, _dtype(a), *sizes, times, _in_and_out(args, out) / times

    return describe


def _attention(kind: int, query: int) -> Callable:
    """The rule of PyTorch's attention over [batch, heads, tokens, head_dim]; twice the work if not causal."""

    def describe(args: Sequence[Any], out: object) -> Description:
        q = args[query]
        batch, heads, tokens, head_dim = q.shape
        causal = next((value for value in args if isinstance(value, bool)), False)
        width = heads * head_dim * (1 if causal else 2)
        return kind, _dtype(q), batch * tokens, 0, width, 1, _in_and_out(args, out)

    return describe


def _moving(kind: int, counted: Callable[[Sequence[Any], Any], int]) -> Callable:
    return lambda args, out: (kind, 0, 0, 0, 0, 1, counted(args, out))


def _in_and_out(args: Sequence[Any], out: object) -> int:
    return _all_bytes(args) + _all_bytes(out if isinstance(out, (list, tuple)) else (out,))


RULES: dict[str, Callable] = {
    **dict.fromkeys(("mm", "bmm"), _product(0)),
    **dict.fromkeys(("addmm", "addmm_", "baddbmm", "baddbmm_"), _product(1)),
    "_scaled_dot_product_flash_attention_for_cpu": _attention(ATTENTION, 0),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention(ATTENTION_BACKWARD, 1),
    "dequantize_4bit": lambda args, out: (
        UNPACK,
        _dtype(out),
        out.numel(),
        0,
        0,
        1,
        _in_and_out(args, out),
    ),  # fmt: skip
    "_allgather_base_": _moving(ALL_GATHER, lambda args, out: nbytes(args[0])),
    "_reduce_scatter_base_": _moving(REDUCE_SCATTER, lambda args, out: nbytes(args[1])),
    "alltoall_base_": _moving(ALL_TO_ALL, lambda args, out: nbytes(args[0])),
    "allreduce_": _moving(ALL_REDUCE, lambda args, out: _all_bytes(args[0])),
    **dict.fromkeys(GATHERS, _moving(ELEMENTWISE, lambda args, out: 2 * nbytes(out))),
    **dict.fromkeys(SCATTERS, _moving(IN_PLACE, lambda args, out: 3 * _all_bytes(args[2:]))),
    **dict.fromkeys(CURVED, _moving(TRANSCENDENTAL, _in_and_out)),
    **dict.fromkeys(VIEWS, lambda args, out: (FREE, 0, 0, 0, 0, 1, 0)),
    **dict.fromkeys(ALLOCATIONS, lambda args, out: None),
}


def asks(args: Sequence[Any], out: object) -> Description:
    """The rule of queries, which are no operation and return no tensor."""
    return None


def rule_of(func: Any) -> Callable[[Sequence[Any], Any], Description]:
    """The rule that describes an operation; look it up once for each operation."""
    namespace, _, name = schema_of(func).name.partition("::")
    if namespace in QUESTIONS:
        return asks
    if name in RULES:
        return RULES[name]
    if func.is_view:
        return RULES["detach"]
    return _moving(IN_PLACE if schema_of(func).is_mutable else ELEMENTWISE, _in_and_out)


def layers_in_order(
    segments: Sequence[Segment], stops: Sequence[int], stand_ins: Sequence[int], phase: str
) -> tuple[np.ndarray, np.ndarray]:
    """Indices of a phase's operations, [n], as the whole model runs them, and the layer of each, [n].

    Each traced layer counts as often as it stands in for one. `stops` are the numbers of traced operations at
    the end of each segment.

    Raises:
        LayersDiffer: a layer did not run in a pass with the others.
    """
    pieces, owners = [np.zeros(0, np.int32)], [np.zeros(0, np.int16)]
    end = 0
    for sweep in sweeps(segments):
        first, end = end, end + len(sweep)
        if sweep[0].phase != phase:
            continue
        number_of = {segments[number].layer: number for number in range(first, end)}
        layers = [(WHOLE_MODEL, WHOLE_MODEL)]  # each with the traced layer that represents it
        if sweep[0].layer != WHOLE_MODEL:
            layers = list(enumerate(stand_ins))[:: 1 if sweep[0].layer == 0 else -1]
        for layer, traced in layers:
            if traced not in number_of:
                raise LayersDiffer(f"layer {traced} did not run with the others")
            number = number_of[traced]
            pieces.append(np.arange(stops[number - 1] if number else 0, stops[number], dtype=np.int32))
            owners.append(np.full(len(pieces[-1]), layer, np.int16))
    return np.concatenate(pieces), np.concatenate(owners)
