"""Decoder layers compiled by torch.compile, each by itself: modules, names and hooks stay as they are.

What is compiled is a layer's own forward pass, inside of what recomputes it. Attention is called as without
compilation, and does not see the compiler look at the lengths of joined rows, so that one compilation serves
all micro-batches. Passes without gradients are not compiled: that would take as long again.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from types import MethodType
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from sft_play.model import attention
from sft_play.model.architecture import decoder_layers
from sft_play.upstream.patching import lasting
from sft_play.upstream.torch import compiling_layers
from sft_play.upstream.transformers import attention_called

# Kinds of layers times what their inputs may be (with a gradient or not, one row or more), of all models that
# a process trains. A layer of more of them would compute without compilation, and PyTorch would say so.
VARIANTS = 32


class Lengths:
    """Lengths of sequences that the compiler does not look into; it would compile for each number of them."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = tuple(lengths)

    def __iter__(self) -> Iterator[int]:
        return iter(self.lengths)


def compile_layers(model: Any) -> None:
    """Lets each decoder layer of a model, or of one with an adapter around it, compute by compiled code.

    The first training step compiles it, once for all layers that are alike and for all lengths.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    lasting(compiling_layers, VARIANTS)
    lasting(attention_called, (attention.NAME, attention.LIBRARY_NAME), _attention())
    for layer in decoder_layers(base)[2]:
        kind: Any = type(layer)
        layer.forward = MethodType(_compiled(kind), layer)


@cache
def _attention() -> Callable[..., Any]:
    """Ours, which is left as it is; always the same function, as what was compiled expects."""
    return torch.compiler.disable(attention.varlen_sdpa)


@cache
def _compiled(kind: Any) -> Callable[..., Any]:
    """The forward pass of layers of a class; they are recomputed where transformers says so."""
    # later versions of transformers wrap it, earlier ones recompute what calls it
    wrapped = issubclass(kind, GradientCheckpointingLayer) and "__call__" not in vars(
        GradientCheckpointingLayer
    )
    own = kind.forward.__wrapped__ if wrapped else kind.forward
    compiled = torch.compile(own, dynamic=True)

    def compute(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return own(layer, *args, **kwargs)
        if (lengths := kwargs.get("sequence_lengths")) is not None:
            kwargs["sequence_lengths"] = Lengths(lengths)
        return compiled(layer, *args, **kwargs)

    def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if wrapped and layer.gradient_checkpointing and layer.training:
            return layer._gradient_checkpointing_func(partial(compute, layer, **kwargs), *args)
        return compute(layer, *args, **kwargs)

    return forward
