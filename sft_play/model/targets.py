"""What an adapter is attached to: the meaning of `tuning.lora.target_modules: auto`.

All linear layers of the decoder, and the weights of fused experts, which are parameters of [experts, rows,
columns] and no layers. Left out is what an adapter would harm or not reach: the output head, routers, which
choose experts, layers whose weights other code reads instead of calling them, and layers that only choose
tokens, which have no gradient.
"""

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.pytorch_utils import Conv1D

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

CHOOSES_EXPERTS = re.compile(r"router|gate$")
CHOOSES_TOKENS = re.compile(r"indexer")
STATE_SPACE = {"A_log", "D"}  # parameters of Mamba's mixers
READ_BY_KERNELS = ("dt_proj", "out_proj")  # layers of these mixers: their kernels take the weights
CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)


@dataclass(frozen=True)
class Targets:
    """Names of the layers, and of the parameters of fused experts, that get an adapter."""

    modules: tuple[str, ...]
    experts: tuple[str, ...]


def text_prefix(model: "PreTrainedModel") -> str | None:
    """Name of the text part of a multimodal model ("model.language_model"); None for a text-only model."""
    if model.config.get_text_config() is model.config:
        return None
    decoder = model.get_decoder()
    return next(name for name, module in model.named_modules() if module is decoder)


def auto_targets(model: "PreTrainedModel") -> Targets:
    """The layers and experts of the text part that get an adapter by default."""
    prefix = text_prefix(model)
    inside = f"{prefix}." if prefix else ""
    experts = tuple(name for name in expert_parameters(model) if name.startswith(inside))
    left_out = {id(model.get_output_embeddings())}
    left_out |= {id(module) for module in (*_routers(model), *_read_elsewhere(model))}
    modules = tuple(
        name
        for name, module in model.named_modules()
        if name.startswith(inside) and id(module) not in left_out and _is_linear(module)
    )
    return Targets(modules, experts)


def expert_parameters(model: torch.nn.Module) -> tuple[str, ...]:
    """Names of the weights of fused experts, each [experts, rows, columns]."""
    found = []
    for path, module in model.named_modules():
        if not isinstance(module, CONVOLUTIONS) and "expert" in f"{path} {type(module).__name__}".lower():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.dim() == 3 and parameter.shape[0] > 1:
                    found.append(f"{path}.{name}")
    return tuple(found)


def _is_linear(module: Any) -> bool:
    """Whether a layer maps [..., in] to [..., out]; some that look like it also choose, or work in groups."""
    if isinstance(module, Conv1D) or type(module).forward is torch.nn.Linear.forward:
        return True
    if not isinstance(module, torch.nn.Linear):
        return False
    if "4bit" in type(module).__name__:
        return True
    probe = module.weight.new_zeros((2, module.in_features))
    try:
        with torch.no_grad():
            out = module(probe)
    except Exception:  # its own code, which expects something else
        return False
    return isinstance(out, torch.Tensor) and out.shape == (2, module.out_features)


def _routers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Linear layers beside experts that weigh or choose them."""
    blocks = {path.rpartition(".")[0] for path, module in model.named_modules() if path.endswith(".experts")}
    for path, module in model.named_modules():
        block = next((block for block in blocks if path.startswith(f"{block}.")), None)
        if block is not None and CHOOSES_EXPERTS.search(path.removeprefix(block)):
            yield module


def _read_elsewhere(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Layers that are not called, or have no gradient."""
    for path, module in model.named_modules():
        if CHOOSES_TOKENS.search(path):
            yield module
        elif {name for name, _ in module.named_parameters(recurse=False)} >= STATE_SPACE:
            yield from (getattr(module, name) for name in READ_BY_KERNELS if hasattr(module, name))


def kept_by_peft(config: "LoraConfig", model: "PreTrainedModel") -> list[str]:
    """The target modules that PEFT does not take for others.

    For some models with experts, PEFT takes the names of shared experts for those that their experts had
    before they were fused, in every adapter that it loads.
    """
    from peft.utils.transformers_weight_conversion import (
        convert_peft_config_for_transformers,
        get_model_conversion_mapping,
    )

    converted = copy.deepcopy(config)
    convert_peft_config_for_transformers(converted, model, get_model_conversion_mapping(model))
    return sorted(converted.target_modules or ())
