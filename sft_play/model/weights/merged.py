"""A base with an adapter merged into it, each weight only when it is written.

PEFT merges into copies in RAM, which add up to the whole model. Here the weights stay mapped from the files
of the base. transformers saves a model file by file, and where weights are offloaded it asks for those of one
file at a time: so it asks here, and each is merged by PEFT's own layer when it is asked for.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import Linear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from transformers import PreTrainedModel

from sft_play.engines.stored import put_to_use, type_in_use
from sft_play.errors import NonFiniteError, first_line
from sft_play.model.weights.finished import first_not_finite
from sft_play.spelling import make, var
from sft_play.upstream.transformers import joins_weights, save_from

FP32_COPIES = 4  # of a matrix, while PEFT merges an adapter into it: product, its multiple, matrix, sum


def merge_when_saved(adapted: PeftModel, dtype: torch.dtype, adapter: Path) -> tuple[PreTrainedModel, int]:
    """The merged model in `dtype`, for its `save_pretrained`, which may raise the error too.

    Weights that transformers joins while loading, as those of experts, are in RAM, and are parted again by
    saving: of a base with some, all weights are merged here. The base cannot be used afterwards.

    Returns:
        the model, and the bytes of RAM that merging takes while it is saved, beside the file being written.

    Raises:
        NonFiniteError: a merged weight is NaN or infinite, in the type of the base or in `dtype`; names
            `adapter`, the folder, or the weight.
    """
    base: Any = adapted.get_base_model()
    mapped = not joins_weights(base)
    layers = _taken_out(adapted) if mapped else {}
    matrices = [weight.numel() for weight in layers]
    _put_adapted_to_use(adapted)
    with _naming(adapter):
        model: Any = adapted.merge_and_unload(safe_merge=True)  # type: ignore[operator]
    if mapped:
        weights = dict(model.named_parameters(remove_duplicate=False))
        _leave_empty(model)
        save_from(model, _MergedWeights(weights, layers, dtype, adapter))
    model.to(dtype)
    whole = [(name, parameter) for name, parameter in model.named_parameters() if not parameter.is_meta]
    _require_finite(whole)
    return model, FP32_COPIES * 4 * max(matrices, default=0)


def _taken_out(adapted: PeftModel) -> dict[Tensor, list[Any]]:
    """Puts the linear layers of the base in the place of PEFT's around them.

    By weight, [out, in], PEFT's layers, in their order: of several where layers share it (Zamba).
    """
    named = [(name, layer) for name, layer in adapted.named_modules() if isinstance(layer, Linear)]
    layers: dict[Tensor, list[Any]] = {}
    for name, layer in named:
        if not any(layer.lora_bias.values()):
            base: Any = layer.get_base_layer()
            layers.setdefault(base.weight, []).append(layer)
            adapted.set_submodule(name, base)
    return layers


def _put_adapted_to_use(adapted: PeftModel) -> None:
    """Casts weights with an adapter, which PEFT merges in the type that it finds."""
    for layer in adapted.modules():
        for parameter in layer.parameters() if isinstance(layer, BaseTunerLayer) else ():
            put_to_use(parameter, "cpu")


@contextmanager
def _naming(adapter: Path) -> Iterator[None]:
    """Says in the error of PEFT's safe_merge which adapter it is about."""
    try:
        yield
    except ValueError as error:
        raise NonFiniteError(
            f"{adapter} cannot be merged: {first_line(error)}. Resume from an earlier checkpoint: "
            f"{make('train', ARGS='train.resume=<checkpoint>')}"
        ) from error


def _leave_empty(model: torch.nn.Module) -> None:
    """Replaces each parameter by one without values; what is tied stays tied."""
    empty = {
        parameter: torch.nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
        for parameter in model.parameters()
    }
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, empty[parameter])


@dataclass(frozen=True)
class _MergedWeights:
    """What transformers takes for the weights of an offloaded model; makes each when it is asked for."""

    weights: Mapping[str, Tensor]  # of the base, by their names in the model
    layers: Mapping[Tensor, list[Any]]  # PEFT's layers around those with this weight
    dtype: torch.dtype
    adapter: Path

    def __getitem__(self, name: str) -> Tensor:
        """A weight as it is to be saved, of any shape."""
        stored = self.weights[name]
        weight = stored.detach().to(type_in_use(stored))
        with _naming(self.adapter):
            for layer in self.layers.get(stored, ()):
                weight = _merged(layer, weight)
        if weight.is_floating_point():
            weight = weight.to(self.dtype)
        _require_finite([(name, weight)])
        return weight


def _merged(layer: Any, weight: Tensor) -> Tensor:
    """PEFT's merge of a layer's adapter into `weight` [out, in], which is not changed."""
    base = layer.get_base_layer()
    empty, base.weight = base.weight, torch.nn.Parameter(weight, requires_grad=False)
    layer.merge(safe_merge=True)
    merged, base.weight = base.weight.data, empty
    layer.merged_adapters.clear()
    return merged


def _require_finite(weights: list[tuple[str, Tensor]]) -> None:
    """Refuses named weights of any shape, in the type in which they are to be saved, that overflow it."""
    if name := first_not_finite(weights):
        dtype = str(dict(weights)[name].dtype).removeprefix("torch.")
        raise NonFiniteError(
            f"merged weight {name} overflows {dtype}; use {var(DTYPE='bfloat16')} or {var(DTYPE='float32')}"
        )
