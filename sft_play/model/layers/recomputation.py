"""How decoder layers are recomputed in the backward pass: all or some of them, from inputs here or in RAM.

transformers turns it on for all layers, which are recomputed from their inputs (`torch.utils.checkpoint`).
"""

from collections.abc import Iterator
from typing import Any

from transformers.modeling_layers import GradientCheckpointingLayer

from sft_play.model.architecture.shape import decoder_layers
from sft_play.model.layers.inputs_in_ram import InputsInRam
from sft_play.parts import Activations
from sft_play.upstream.transformers import recompute_by

RECOMPUTING: dict[str, Any] = {"use_reentrant": False}


def recompute(model: Any, activations: Activations) -> None:
    """Lets a model, or one with an adapter around it, recompute its layers; as in `adjust`."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(RECOMPUTING))
    adjust(model, activations)


def adjust(model: Any, activations: Activations) -> None:
    """Changes a model, or one with an adapter around it, each time that transformers has turned this on.

    The last layers, which keep their activations, come first in the backward pass, so what they keep is gone
    when the others are recomputed. Inputs of recomputed layers that are in RAM are copied to pinned RAM, and
    back when they are needed. transformers 5.23 can do so too (`offload`), on the stream of the computation,
    but fails on a machine without a GPU.
    """
    offload = activations.policy == "offload"
    if not activations.partly_kept and not offload:
        return
    layers, inputs = decoder_layers(model)[2], InputsInRam()
    for number, layer in enumerate(layers):
        found: Iterator[Any] = (m for m in layer.modules() if isinstance(m, GradientCheckpointingLayer))
        for module in found:
            if number >= len(layers) - activations.kept_layers:
                module.gradient_checkpointing = False
            elif offload:
                recompute_by(module, inputs.checkpoint)


def can_mix(model: Any) -> bool:
    """Whether it can be told for each decoder layer by itself whether it is recomputed."""
    return all(isinstance(layer, GradientCheckpointingLayer) for layer in decoder_layers(model)[2])
