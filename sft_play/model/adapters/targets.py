"""What an adapter is attached to: the meaning of `tuning.lora.target_modules: auto`.

All linear layers of the decoder, and the weights of fused experts, which are parameters of [experts, rows,
columns] and no layers. Left out is what an adapter would harm or not reach: the output head, routers, which
choose experts, layers whose weights other code reads instead of calling them, and layers that only choose
tokens, which have no gradient.
"""

import copy
import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers.pytorch_utils import Conv1D

from sft_play.errors import ConfigError

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


def is_within(name: str, modules: Sequence[str]) -> bool:
    """Whether a module or parameter is one of these modules, or a part of one."""
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def text_prefix(model: "PreTrainedModel") -> str | None:
    """Name of the text part of a multimodal model ("model.language_model"); None for a text-only model."""
    if model.config.get_text_config() is model.config:
        return None
    decoder = model.get_decoder()
    return next(name for name, module in model.named_modules() if module is decoder)


def parts_within(model: "PreTrainedModel", seeing: Sequence[str] = ()) -> tuple[str, ...]:
    """How the names of modules begin that may have an adapter."""
    prefix = text_prefix(model)
    return tuple(f"{part}." for part in (prefix, *seeing)) if prefix else ("",)


def auto_targets(model: "PreTrainedModel", whole: Sequence[str] = (), seeing: Sequence[str] = ()) -> Targets:
    """The layers and experts that get an adapter by default, outside of `whole` modules.

    They are those of the text part, and of `seeing` modules of a model that sees.
    """
    inside = parts_within(model, seeing)
    matrices = [name for name, weight in fused_experts(model) if weight.dim() == 3 and weight.shape[0] > 1]
    experts = tuple(name for name in matrices if name.startswith(inside) and not is_within(name, whole))
    left_out = {id(model.get_output_embeddings())}
    left_out |= {id(module) for module in (*_routers(model), *_read_elsewhere(model))}
    modules = tuple(
        name
        for name, module in model.named_modules()
        if name.startswith(inside)
        and not is_within(name, whole)
        and id(module) not in left_out
        and _is_linear(module)
    )
    return Targets(modules, experts)


def fused_experts(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Name and weights of fused experts: matrices that are parameters and no layers."""
    for path, module in model.named_modules():
        is_layer = isinstance(module, (torch.nn.Linear, Conv1D, *CONVOLUTIONS))
        if not is_layer and "expert" in f"{path} {type(module).__name__}".lower():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.dim() > 1:
                    yield f"{path}.{name}", parameter


def _is_linear(module: torch.nn.Module) -> bool:
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


def modules_to_save(model: "PreTrainedModel", names: Sequence[str]) -> list[str]:
    """The modules of the text part that are called by one of the names, each by its full name.

    Raises:
        ConfigError: there is none of a name, or it cannot be trained whole.
    """
    prefix = text_prefix(model)
    inside = tuple(f"{part}." for part in (prefix, "lm_head") if part) if prefix else ("",)
    modules = {name: module for name, module in model.named_modules() if f"{name}.".startswith(inside)}
    found = []
    for wanted in names:
        matching = [name for name in modules if name == wanted or name.endswith(f".{wanted}")]
        if not matching:
            last = sorted({name.rpartition(".")[2] for name in modules} - {""})
            close = difflib.get_close_matches(wanted, last, n=5, cutoff=0.0)
            raise ConfigError(
                f"tuning.lora.modules_to_save: no module of {type(model).__name__} is named {wanted!r}; "
                f"closest: {', '.join(close)}"
            )
        for name in matching:
            _require_trainable(name, modules[name])
        found += matching
    return found


def _require_trainable(name: str, module: torch.nn.Module) -> None:
    problem = None
    if isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
        problem = "is a list of modules; name the modules in it"
    elif not any(True for _ in module.parameters()):
        problem = "has no weights to train"
    elif any("4bit" in type(part).__name__ for part in module.modules()):
        problem = "has 4-bit weights, which cannot be trained; leave it out, or set tuning.mode=lora"
    if problem:
        raise ConfigError(f"tuning.lora.modules_to_save: {name} {problem}")


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
