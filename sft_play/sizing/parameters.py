"""Parameters counted for the plan: those that QLoRA packs into 4 bits, and those trained beside adapters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.pytorch_utils import Conv1D

from sft_play.errors import ConfigError
from sft_play.model.architecture import empty_model
from sft_play.model.targets import fused_experts, modules_to_save
from sft_play.reasons import FourBitBase, NewTokens, TrainedWhole
from sft_play.units import format_bytes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

PACKED_BYTES = 0.5 + (1 + 4 / 256) / 64  # of a weight in NF4, with its share of double-quantized scales
MOST_IN_EXPERTS = 0.1  # of the weights: more than this is not worth 4-bit layers around it

CLAMPS_WEIGHTS = {"gemma3n_text"}
COUNTED: dict[str, "FourBit"] = {}  # by config


@dataclass(frozen=True)
class FourBit:
    """Weights of a base model by how QLoRA keeps them; their sum is `weights`."""

    model: str
    weights: int
    packed: int  # in linear layers
    experts: int  # in fused experts, which stay in 16 bit

    def bytes(self, packed: int) -> int:
        """Size of the base with so many weights in 4 bits and the others in 16."""
        return round(packed * PACKED_BYTES + 2 * (self.weights - packed))


def four_bit(config: "PretrainedConfig") -> FourBit:
    """Counts the weights of an architecture on the meta device; once, since a table has many plans of it."""
    text = config.to_json_string(use_diff=False)
    if text not in COUNTED:
        COUNTED[text] = _counted(config)
    return COUNTED[text]


def _counted(config: "PretrainedConfig") -> FourBit:
    model = empty_model(config)
    head = model.get_output_embeddings()
    linear = (torch.nn.Linear, Conv1D)
    packed = [module for module in model.modules() if isinstance(module, linear) and module is not head]
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return FourBit(
        model=type(model).__name__,
        weights=sum(sizes.values()),
        packed=sum(module.weight.numel() for module in packed),
        experts=sum(weight.numel() for _, weight in fused_experts(model)),
    )


def require_packable(config: "PretrainedConfig") -> FourBitBase:
    """How much of the base is 4-bit.

    Raises:
        ConfigError: much of it would not be, since fused experts stay in 16 bit, or it does not work at all.
    """
    if config.get_text_config().model_type in CLAMPS_WEIGHTS:
        raise ConfigError(
            f"tuning.mode=qlora: {config.model_type} clamps weights while it trains, which 4-bit ones do not "
            "allow; set tuning.mode=lora"
        )
    found = four_bit(config)
    if found.experts > MOST_IN_EXPERTS * found.weights:
        share, as_it_is = found.experts / found.weights, format_bytes(found.bytes(found.packed))
        raise ConfigError(
            f"tuning.mode=qlora: {share:.0%} of the weights of {found.model} are fused experts, which stay "
            f"in 16 bit, so that the base would take {as_it_is} instead of {format_bytes(found.bytes(0))}; "
            "set tuning.mode=lora, or use QLoRA with a model without experts"
        )
    return FourBitBase(found.packed / found.weights, found.bytes(found.packed), found.bytes(0))


def trained_besides(
    config: "PretrainedConfig", tokens: int, names: Sequence[str]
) -> tuple[NewTokens | None, TrainedWhole | None]:
    """The rows of new tokens, and the modules that are trained whole.

    Args:
        config: the architecture.
        tokens: number of new tokens.
        names: tuning.lora.modules_to_save, if there is an adapter.

    Raises:
        ConfigError: this model has no such module.
    """
    model: Any = empty_model(config)
    rows = whole = None
    if tokens:
        outer = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
        parameters = sum({id(weight): tokens * weight.shape[1] for weight in outer}.values())
        rows = NewTokens(tokens, parameters, tied=outer[0] is outer[1])
    if names:
        modules = modules_to_save(model, names)
        weights = {id(p): p.numel() for name in modules for p in model.get_submodule(name).parameters()}
        whole = TrainedWhole(sum(weights.values()), len(modules), tuple(names))
    return rows, whole
