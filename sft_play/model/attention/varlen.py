"""Attention without masks, through PyTorch's fused kernels.

Training rows are padded on the right and attention is causal, so a real token never attends to padding and no
mask is needed; outputs at padded positions are ignored by their labels (-100). Joined and packed rows come
with the lengths of their sequences, so that attention cannot leak between them. A mask would cost seq_len**2
elements, repeat the key and value heads, and take the kernel off its fast path.

On CUDA, PyTorch's flash kernel runs where it can (`table.FLASH`): one call for all sequences that
are joined (`JOINED`). Elsewhere each sequence gets a call of its own, on a GPU of the memory-efficient
kernel with repeated key and value heads: with fewer of them PyTorch would choose its math kernel, which
writes all scores to memory.

Some models (gpt-oss) let each token also attend to a sink: a learned score per head whose value is zero. No
fused kernel has sinks, but one more position does the same: see `_attend_with_sinks`.
"""

import functools
import itertools
from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention

from sft_play.choices.kernels import Capability
from sft_play.errors import ConfigError
from sft_play.model.attention.sequence_parallel import attend_in_parallel
from sft_play.model.attention.table import FLASH, JOINED, NAME
from sft_play.upstream.patching import lasting
from sft_play.upstream.torch import without_cudnn_attention
from sft_play.upstream.transformers import attention_called

# Says that keys have fewer heads than queries; torch 2.11 has no such flag, and its kernel takes them.
GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
LIBRARY_NAME = "varlen"  # for transformers, which takes any name with "sdpa" in it for PyTorch's function
Block = tuple[int, int, int]  # where its sequence begins, and where the block begins and ends, in tokens
SINK_WIDTH = 8  # columns that a sink adds to heads, since fused kernels want multiples of 8


@functools.cache  # asked for each sequence in each layer
def device_capability(device: torch.device) -> Capability | None:
    """The compute capability of a GPU; None for a CPU, whose kernel supports all that is needed here."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def kernel_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The type that a kernel computes in, under autocast as well; its input has any shape."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def type_name(dtype: torch.dtype) -> str:
    """`type_name(torch.bfloat16)` is "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _supports_groups(query: torch.Tensor, dropout: float) -> bool:
    """Whether the kernel for a query, [batch, heads, tokens, head_dim], takes fewer key and value heads."""
    capability = device_capability(query.device)
    if capability is None:
        return True
    return FLASH.takes(capability, type_name(kernel_dtype(query)), query.shape[-1], dropout=dropout)


def takes_one_call(query: torch.Tensor, value: torch.Tensor, dropout: float) -> bool:
    """Whether one call serves all joined sequences of a query, [1, heads, tokens, head_dim]."""
    capability, head_dim = device_capability(query.device), query.shape[-1]
    if capability is None or value.shape[-1] != head_dim:
        return False
    return JOINED.takes(capability, type_name(kernel_dtype(query)), head_dim, dropout=dropout)


@functools.lru_cache(maxsize=1)  # all layers ask for those of one micro-batch
def offsets_of(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Where sequences begin, and the last one ends, [sequences + 1]."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)


def _attend_joined(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: tuple[int, ...],
    window: int | None,
    scale: float | None,
) -> torch.Tensor:
    """Causal attention within each of the joined sequences, in one call.

    Query is [1, heads, tokens, head_dim], key and value are [1, key_value_heads, tokens, head_dim]; the
    result is [1, tokens, heads, head_dim].
    """
    dtype, longest = kernel_dtype(query), max(lengths)
    query, key, value = (tensor.to(dtype)[0].transpose(0, 1) for tensor in (query, key, value))
    offsets = offsets_of(lengths, query.device)
    before = -1 if window is None or window >= longest else window - 1  # besides the token itself
    out: Any = varlen_attn(
        query, key, value, offsets, offsets, longest, longest,
        scale=scale, window_size=(before, 0), **GROUPED,
    )  # fmt: skip
    return out[None]


def _attend_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    sinks: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """As `_attend`, but each token also attends to a sink with the score `sinks`, [heads].

    The sink is a key in front of all others, with a column of its own: there it is 1, the other keys are 0,
    and the query has the score. The query at its position is dropped again.
    """
    head_dim, wider = query.shape[-1], (0, SINK_WIDTH, 1, 0)  # columns behind, one position in front
    window = None if window is None or window >= query.shape[2] else window  # the sink is in none of them
    scale = options.pop("scale") or head_dim**-0.5
    scores = (sinks / scale).to(query.dtype)[:, None, None].expand(*query.shape[:-1], 1)
    query = torch.cat([query, pad(scores, (0, SINK_WIDTH - 1))], dim=-1)
    with_sink = pad(key, wider)
    with_sink[:, :, 0, head_dim] = 1
    query, value = pad(query, (0, 0, 1, 0)), pad(value, wider)
    out = _attend(query, with_sink, value, window, first_is_sink=True, scale=scale, **options)
    return out[:, :, 1:, :-SINK_WIDTH]


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    *,
    first_is_sink: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Causal attention over one sequence; a sliding window shorter than the sequence needs a band mask.

    Query is [batch, heads, tokens, head_dim], key and value are [batch, key_value_heads, tokens, head_dim];
    the result has the shape of the query. All windows contain the first position if it is a sink.
    """
    tokens, groups = query.shape[2], query.shape[1] // key.shape[1]
    window = min(window or tokens, tokens)
    masked = window < tokens
    # with a mask, no fused kernel of CUDA takes groups
    if groups > 1 and (masked or not _supports_groups(query, options["dropout_p"])):
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        groups = 1
    if not masked:
        return scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=groups > 1, **options
        )
    position = torch.arange(tokens, device=query.device)
    distance = position[:, None] - position[None, :]
    band = (distance >= 0) & (distance < window)  # [tokens, tokens]
    if first_is_sink:
        band[:, 0] = True
    return scaled_dot_product_attention(query, key, value, attn_mask=band, **options)


def varlen_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    sequence_lengths: Sequence[int] | None = None,
    s_aux: torch.Tensor | None = None,
    sequence_group: object = None,
    two_way_blocks: Sequence[Block] = (),
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls in each layer.

    Query is [batch, heads, tokens, head_dim], key and value are [batch, key_value_heads, tokens, head_dim].
    `sliding_window` counts the tokens that a token attends to, itself included. `sequence_lengths` are the
    tokens of each sequence in a batch of one row: plain integers, since lengths in a GPU tensor would make
    every layer wait for the device. `s_aux` are the scores of attention sinks, [heads]. With a
    `sequence_group`, a process group, the tokens are a rank's part of these sequences
    (model/attention/sequence_parallel.py). Tokens of `two_way_blocks` see all of their block.

    Returns:
        The output, [batch, tokens, heads, head_dim], and no attention weights.

    Raises:
        ConfigError: the layer computes a mask of its own.
    """
    if attention_mask is not None:
        raise ConfigError(
            f"model.attention={NAME}: {type(module).__name__} computes a mask of its own, which this "
            "attention would ignore; set model.attention=sdpa or eager"
        )
    attend = functools.partial(
        _attend_sequences,
        window=sliding_window,
        lengths=None if sequence_lengths is None else tuple(sequence_lengths),
        dropout=dropout,
        scale=scaling,
    )
    if sequence_group is not None:
        return attend_in_parallel(attend, query, key, value, sequence_group, s_aux), None
    out = attend(query, key, value, s_aux)
    if two_way_blocks:
        options = dict(dropout_p=dropout, scale=scaling)
        out = _with_two_way(out, query, key, value, two_way_blocks, sliding_window, **options)
    return out.contiguous(), None


def _with_two_way(
    attended: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: Sequence[Block],
    window: int | None,
    **options: Any,
) -> torch.Tensor:
    """The output, [1, tokens, heads, head_dim], in which the tokens of each block have seen all of it.

    Other arguments are as of `varlen_sdpa`, for joined sequences. A window hides nothing behind a token.
    Queries that share a key lie behind each other, so that no block keeps copies of keys.
    """
    edges = [0, *(edge for _, *ends in blocks for edge in ends), query.shape[2]]
    sizes = [end - begin for begin, end in itertools.pairwise(edges)]
    parts, groups = list(attended.split(sizes, 1)), query.shape[1] // key.shape[1]
    queries = query.unflatten(1, (-1, groups)).split(sizes, 3)[1::2]
    for at, (first, begin, end) in enumerate(blocks):
        seen, band = first if window is None else max(first, begin - window + 1), None
        if window is not None and window < end - seen:
            position = torch.arange(seen, end, device=query.device)
            band = (position[begin - seen :, None] - position[None, :] < window).repeat(groups, 1)
        out = scaled_dot_product_attention(
            queries[at].flatten(2, 3), key[:, :, seen:end], value[:, :, seen:end], attn_mask=band, **options
        )
        parts[2 * at + 1] = out.unflatten(2, (groups, -1)).flatten(1, 2).transpose(1, 2)
    return torch.cat(parts, dim=1)


def _attend_sequences(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    *,
    window: int | None,
    lengths: tuple[int, ...] | None,
    dropout: float,
    scale: float | None,
) -> torch.Tensor:
    """Attention within each of the joined sequences, or of the rows; arguments as of `varlen_sdpa`.

    The result is [batch, tokens, heads, head_dim].
    """
    options: dict[str, Any] = {"dropout_p": dropout, "scale": scale}
    attend = _attend if sinks is None else functools.partial(_attend_with_sinks, sinks=sinks)
    if lengths is None:
        return attend(query, key, value, window, **options).transpose(1, 2)
    if sinks is None and takes_one_call(query, value, dropout):
        return _attend_joined(query, key, value, lengths, window, scale)
    # Split as they lie in memory, [batch, tokens, heads, head_dim], and so are their gradients joined.
    parts = (tensor.transpose(1, 2).split(list(lengths), 1) for tensor in (query, key, value))
    sequences = ([part.transpose(1, 2) for part in sequence] for sequence in zip(*parts, strict=True))
    outs = [attend(q, k, v, window, **options).transpose(1, 2) for q, k, v in sequences]
    return torch.cat(outs, dim=1)


def register() -> None:
    """Lets transformers call our attention, without a mask function, until the command is over."""
    lasting(without_cudnn_attention)
    lasting(attention_called, (NAME, LIBRARY_NAME), varlen_sdpa)


def library_name(implementation: str) -> str:
    """What transformers calls an attention implementation."""
    return LIBRARY_NAME if implementation == NAME else implementation
