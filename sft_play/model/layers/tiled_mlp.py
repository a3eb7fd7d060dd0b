"""Lets the MLP of each decoder layer compute over tiles of the tokens, as ALST does (arXiv 2506.13996).

An MLP computes each token by itself, so its intermediates, several times as wide as the model, need never
exist for all tokens at once: a tile keeps its input alone, and is computed again in the backward pass.
DeepSpeed's `TiledMLP` adds the gradients of tiles to those of the weights by itself, of which engines other
than its own are not told; PyTorch's checkpoints, one in another, leave that to autograd.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from sft_play.model.architecture.shape import decoder_layers
from sft_play.model.layers.own_passes import forward_of, replace_forward

Forward = Callable[[torch.Tensor], torch.Tensor]


def tile_mlps(model: Any, tile_tokens: int) -> int:
    """Lets the MLPs of a model, or within an adapter, compute so many tokens at a time; how many these are.

    Mixtures of experts are left alone: they divide tokens by themselves.
    """
    mlps = [mlp for layer in decoder_layers(model)[2] for mlp in mlps_of(layer)]
    for mlp in mlps:
        replace_forward(mlp, partial(_in_tiles, partial(_with_own_casts, forward_of(mlp)), tile_tokens))
    return len(mlps)


def mlps_of(layer: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules of a decoder layer that take one tensor, and have linear layers and nothing else to train.

    Attention takes more, and the router of a mixture of experts is no linear layer, or its experts are not.
    """
    for module in layer.children():
        takes = list(inspect.signature(type(module).forward).parameters.values())[1:]
        single = len(takes) == 1 and takes[0].kind is takes[0].POSITIONAL_OR_KEYWORD
        if single and type(module).__name__.endswith("MLP") and _linear_layers(module) >= 2:
            yield module


def _linear_layers(module: torch.nn.Module) -> int:
    """How many linear layers a module consists of, adapted ones included; 0 if it has other weights."""
    count = 0
    for child in module.children():
        if isinstance(child, (torch.nn.Linear, Conv1D)) or hasattr(child, "base_layer"):
            count += 1
        elif [*child.parameters(), *child.buffers()]:
            return 0
    return 0 if [*module.parameters(recurse=False)] else count


def _in_tiles(forward: Forward, tile_tokens: int, x: torch.Tensor) -> torch.Tensor:
    """What `forward` gives for x, [..., hidden_size], of which it gets [1, tile_tokens, hidden_size]."""
    tokens = x.reshape(1, -1, x.shape[-1])
    if tokens.shape[1] <= tile_tokens:
        return forward(x)
    tiles = [checkpoint(forward, tile, use_reentrant=False) for tile in tokens.split(tile_tokens, dim=1)]
    return torch.cat(tiles, dim=1).view(x.shape)


def _with_own_casts(forward: Forward, x: torch.Tensor) -> torch.Tensor:
    """What `forward` gives for x, [..., hidden_size], without casts that autocast has kept.

    The gradients of all tiles would be added where a cast is shared, rounded to 16 bits after each.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        return forward(x)
    finally:
        torch.set_autocast_cache_enabled(before)
