"""Attention without masks: PyTorch's fused kernel, called once per sequence.

Training rows are padded on the right and attention is causal, so a real token never sees padding and no mask is needed:
what the padded positions compute is thrown away by their labels (-100). Packed rows come with the boundaries lengths of their
sequences, and each sequence is attended by a call of its own. A mask would cost seq_len**2 elements,
repeat the key and value heads, and take the kernel off its fast path.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

NAME = "varlen_sdpa"


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None, **options: Any) -> torch.Tensor:
    """Causal attention over one stretch of [batch, heads, tokens, head_dim]; a window shorter than it needs a band mask."""
    tokens = query.shape[2]
    if window is None or window >= tokens:
        return scaled_dot_product_attention(query, key, value, is_causal=True, **options)
    position = torch.arange(tokens, device=query.device)
    distance = position[:, None] - position[None, :]
    band = (distance >= 0) & (distance < window)
    if options.pop("enable_gqa"):  # with a mask, CUDA's fused kernels want one key and value head for each query head
        key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1) for tensor in (key, value))
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
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls in each layer.

    Args:
        module: the layer's attention module.
        query: [batch, heads, tokens, head_dim]; key and value may have fewer heads (grouped queries).
        key: [batch, key_value_heads, tokens, head_dim].
        value: as key.
        attention_mask: not used: none is ever built for this function.
        dropout: probability during training.
        scaling: of the scores; default head_dim ** -0.5.
        sliding_window: tokens that a token sees, itself included.
        sequence_lengths: tokens of each packed sequence in a batch of one row, adding up to all tokens. Plain integers, since
            lengths in a GPU tensor would make every layer wait for the device.
        kwargs: what other attention functions take.

    Returns:
        [batch, tokens, heads, head_dim], and no attention weights.
    """
    options = {"dropout_p": dropout, "scale": scaling, "enable_gqa": key.shape[1] != query.shape[1]}
    if sequence_lengths is None:
        out = _attend(query, key, value, sliding_window, **options).transpose(1, 2)
    else:
        parts = zip(*(tensor.split(list(sequence_lengths), dim=2) for tensor in (query, key, value)), strict=True)
        out = torch.cat([_attend(q, k, v, sliding_window, **options).transpose(1, 2) for q, k, v in parts], dim=1)
    return out.contiguous(), None


def register() -> None:
    """Makes `attn_implementation="varlen_sdpa"` known to transformers; it has no mask function, so no mask is built."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, varlen_sdpa)
