"""Decoder layers compiled by torch.compile, each by itself: modules, names and hooks stay as they are.

What is compiled is a layer's own forward pass, inside of what recomputes it, as one graph: attention over
joined rows is one operator in it (model/attention/operator.py), and the number of tokens may change, so that
one compilation serves all micro-batches. Passes without gradients are not compiled: that would take as long
again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from sft_play.cache import cache_dir, private_entry, written_to
from sft_play.files import own_folder
from sft_play.fingerprints import installed_versions, own_code
from sft_play.model.architecture.shape import decoder_layers
from sft_play.model.attention import varlen
from sft_play.model.attention.operator import Rows, attend_joined, on_cpu, rows_of, serves
from sft_play.model.layers.own_passes import replace_forward
from sft_play.ui.console import warn
from sft_play.upstream.patching import lasting
from sft_play.upstream.torch import compiling_layers, in_given_order, mark_dynamic, without_leftovers
from sft_play.upstream.transformers import attention_called, recomputed

# Kinds of layers times what their inputs may be (with a gradient or not, one row or more), of all models that
# a process trains. A layer of more of them would compute without compilation, and PyTorch would say so.
VARIANTS = 32

Compiler = Callable[[Any], Callable[..., Any]]  # a function -> the same one compiled


def compile_layers(model: Any, compiler: Compiler | None = None) -> None:
    """Lets each decoder layer of a model, or of one with an adapter around it, compute by compiled code.

    The first training step compiles it, once for all layers that are alike and for all lengths.
    """
    for layer, forward in compiled_forwards(model, compiler).items():
        replace_forward(layer, forward)


def compiled_forwards(model: Any, compiler: Compiler | None = None) -> dict[torch.nn.Module, Any]:
    """Decoder layer -> the function by which it computes with compiled code; the model is left as it is."""
    # on a GPU, nothing else was measured than PyTorch's defaults
    compiler = compiler or (in_given_order if on_cpu(next(model.parameters())) else torch.compile)
    lasting(compiling_layers, VARIANTS, f"{own_code()} {installed_versions()}", _kept_code)
    lasting(attention_called, (varlen.NAME, varlen.LIBRARY_NAME), _attention)
    found = dict[torch.nn.Module, Any]()
    for layer in decoder_layers(model)[2]:
        kind: Any = type(layer)
        found[layer] = MethodType(_compiled(kind, compiler), layer)
    return found


def plain_forwards(model: Any) -> dict[torch.nn.Module, Any]:
    """Decoder layer -> the function by which it computes without compiled code; as `compiled_forwards`."""
    return {layer: MethodType(type(layer).forward, layer) for layer in decoder_layers(model)[2]}


@cache
def _kept_code() -> str:
    """The folder of compiled code, from which it is loaded and run: one for all runs of this user."""
    if found := private_entry("compiled", torch.__version__):
        lasting(_written_to, found)
        return str(found)
    warn(
        f"compiled code is not kept, because other users can write to {cache_dir()} or a folder above it, or "
        "you cannot: each run compiles again; set SFT_PLAY_CACHE to another folder"
    )
    return str(own_folder("sft-play-compiled-"))


@contextmanager
def _written_to(folder: Path) -> Iterator[None]:
    with written_to(folder) as emptied:
        if emptied:
            warn("an earlier run was killed, which may have cut off compiled code: it is compiled again")
        yield


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sequence_lengths: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """`varlen_sdpa`, in compiled layers by an operator where one serves it, else between two graphs."""
    call = partial(varlen.varlen_sdpa, module, query, key, value, attention_mask, **options)
    if not isinstance(sequence_lengths, Rows):  # nothing is compiled, or rows are padded
        return call(sequence_lengths=sequence_lengths)
    if options.get("s_aux") is None and serves(query, value, options.get("dropout", 0.0)):
        window, scale = options.get("sliding_window"), options.get("scaling")
        return attend_joined(query, key, value, sequence_lengths, window, scale), None
    return _between_graphs(call, sequence_lengths)


@torch.compiler.disable
def _between_graphs(call: Callable[..., tuple[torch.Tensor, None]], rows: Rows) -> tuple[torch.Tensor, None]:
    return call(sequence_lengths=rows.lengths)


@cache
def _compiled(kind: Any, compiler: Compiler) -> Callable[..., Any]:
    """The forward pass of layers of a class; they are recomputed where transformers says so."""
    # later versions of transformers wrap it, earlier ones recompute what calls it
    wrapped = issubclass(kind, GradientCheckpointingLayer) and "__call__" not in vars(
        GradientCheckpointingLayer
    )
    own = kind.forward.__wrapped__ if wrapped else kind.forward
    compiled = without_leftovers(compiler(own))

    def compute(layer: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return own(layer, hidden, *args, **kwargs)
        if (lengths := kwargs.get("sequence_lengths")) is not None:
            kwargs["sequence_lengths"] = rows_of(tuple(lengths), hidden.device)
        _mark(hidden, args, kwargs.values())
        return compiled(layer, hidden, *args, **kwargs)

    def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if wrapped and layer.gradient_checkpointing and layer.training:
            return recomputed(layer, partial(compute, layer, **kwargs), *args)
        return compute(layer, *args, **kwargs)

    return forward


def _mark(hidden: torch.Tensor, *others: Any) -> None:
    """Says that the numbers of rows and tokens change, in all inputs of a layer, [rows, tokens, ...]."""
    tokens = hidden.shape[1]
    for value in chain([hidden], *others):
        for tensor in value if isinstance(value, tuple) else [value]:
            if isinstance(tensor, torch.Tensor) and tensor.shape[1:2] == (tokens,):
                mark_dynamic(tensor, 0, 1)
