"""Models that see: attention by part, parts that are left alone, and how pictures of joined rows come in."""

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import BaseModelOutputWithPooling

from sft_play.upstream.accelerate import place_of_forward
from sft_play.upstream.patching import lasting
from sft_play.upstream.transformers import attention_called, deepstack_added_by, features_made_by
from sft_play.vision.looks import look_of, seeing_parts

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TOWER = "tower"


def attention_by_part(config: "PretrainedConfig", implementation: str) -> str | dict[str, str]:
    """An implementation for the decoder, and PyTorch's without a mask for a tower, for transformers.

    A tower attends to whole pictures, in both directions: ours would be causal there. Under a name that
    transformers does not know, nobody makes a mask and looks into it to see whether it can be left out.
    """
    if not seeing_parts(config) or implementation == "eager":
        return implementation
    lasting(attention_called, (TOWER,), sdpa_attention_forward)
    return {"": implementation, "text_config": implementation, "vision_config": TOWER}


def join_pictures(model: Any) -> None:
    """Lets a base model take pictures of rows without looking into data; frozen parts keep nothing.

    A part of which nothing is trained, nor of those before it, keeps nothing for a backward pass: PEFT's hook
    on the first layer of a tower would let it keep all, and recomputing would do so for nothing.
    """
    look = look_of(model.config)
    if look.kind == "tiles":
        features_made_by(model.model, _tile_features)
    elif look.adds_to_layers:
        deepstack_added_by(model.model.language_model, AddedRows.apply)
    learns = False
    for name in seeing_parts(model.config):  # in the order in which one takes what the one before makes
        part = attrgetter(name)(model)
        learns |= any(parameter.requires_grad for parameter in part.parameters())
        if not learns:
            place = place_of_forward(part)
            forward: Callable[..., Any] = getattr(part, place)
            setattr(part, place, torch.no_grad()(forward))


def _tile_features(
    model: Any, pixel_values: torch.Tensor, *_: object, **__: object
) -> BaseModelOutputWithPooling:
    """Features of tiles, [tiles, 3, side, side], of which each is whole and none a filler."""
    tiles = pixel_values.reshape(-1, *pixel_values.shape[-3:]).to(model.dtype)
    seen = model.vision_model(pixel_values=tiles, return_dict=True).last_hidden_state
    features = model.connector(seen).flatten(0, 1)
    pooled: Any = [features]  # of pictures, as transformers has them here
    return BaseModelOutputWithPooling(last_hidden_state=seen, pooler_output=pooled)


class AddedRows(torch.autograd.Function):
    """Adds rows, [places, width], to hidden states, [1, tokens, width], where a mask, [1, tokens], is true.

    Neither direction makes a tensor whose size depends on data, for which a GPU would have to be waited for.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The sum, [1, tokens, width]."""
        ctx.save_for_backward(mask)
        ctx.count = len(rows)
        rows = rows.to(hidden.device, hidden.dtype)
        return hidden + torch.zeros_like(hidden).masked_scatter_(mask[..., None].to(hidden.device), rows)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The gradients of the states, [1, tokens, width], and of the rows."""
        (mask,), (grad,) = ctx.saved_tensors, grads
        if not ctx.needs_input_grad[2]:
            return grad, None, None
        places = torch.argsort(mask.flatten().logical_not(), stable=True)[: ctx.count]
        return grad, None, grad.flatten(0, -2).index_select(0, places)
