"""Adapters that start as a part of the weights: PiSSA (arXiv 2404.02948) and OLoRA (arXiv 2406.01775).

PEFT decomposes a weight W into W - s * B0 @ A0 and an adapter that starts with B0 and A0, so the model is the
same and the principal part of W is trained. What is learned, s * (B @ A - B0 @ A0), is saved as an adapter of
twice the rank for the W that everybody has. PEFT's own conversion drops what is trained beside adapters, and
refuses rsLoRA with ranks or alphas by pattern.

A resumed run decomposes again, with the random numbers of its seed. Ranks need not find the same start bit
for bit: DDP and DeepSpeed send the weights of rank 0 to all, and rank 0 saves its own start.
"""

import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor

from sft_play.config.schema import LoraSettings
from sft_play.errors import ConfigError
from sft_play.files import replacing_file
from sft_play.ui.console import console
from sft_play.ui.progress import progress_bar
from sft_play.units import format_duration

WEIGHTS = "adapter_model.safetensors"
ADAPTER = "default"  # PEFT's name for the only one
PISSA = "pissa_niter_16"  # by iteration: whole decompositions take minutes for a large model
SAID_FROM = 10  # seconds of work, after which a line says how long it took


def take_out_start(model: PeftModel, lora: LoraSettings) -> None:
    """Starts the fp32 adapters with a part of the weights of their layers, which lose it.

    Raises:
        ConfigError: a weight cannot be decomposed so, or is NaN or infinite.
    """
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]
    for name, layer in layers:
        _require_decomposable(name, layer, lora.init)
    if any(layer.get_base_layer().weight.is_meta for _, layer in layers):
        return
    start: dict[str, Tensor] = {}
    began = time.monotonic()
    with progress_bar(f"{lora.init}: preparing the adapters", len(layers)) as advance:
        for name, layer in layers:
            _decompose(name, layer, lora.init)
            for part in ("lora_A", "lora_B"):
                weight = getattr(layer, part)[ADAPTER].weight
                weight.data = weight.data.clone()  # OLoRA's are views of all of Q and R
                start[f"{name}.{part}.weight"] = weight.data.cpu().clone()
            advance(1)
    model.start_of_adapters = start  # type: ignore[assignment]  # in RAM, for `save_trained`
    if (seconds := time.monotonic() - began) > SAID_FROM:
        console().print(f"  {lora.init}: prepared {len(layers)} adapters in {format_duration(seconds)}")


def _require_decomposable(name: str, layer: Any, init: str) -> None:
    rank, shape = layer.r[ADAPTER], tuple(layer.get_base_layer().weight.shape)
    if rank > min(shape):
        raise ConfigError(
            f"tuning.lora.init={init} decomposes weights, and that of {name}, {shape[0]} x {shape[1]}, has "
            f"no rank {rank}; set tuning.lora.r, or the rank_pattern of that module, to {min(shape)} or less"
        )
    if layer.fan_in_fan_out and init == "olora":
        raise ConfigError(
            "tuning.lora.init=olora: PEFT does not decompose weights that are stored transposed, as that of "
            f"{name} is; set tuning.lora.init=pissa"
        )


def _decompose(name: str, layer: Any, init: str) -> None:
    """PEFT's decomposition of a layer, whose weight and adapter it overwrites."""
    try:
        if init == "olora":
            layer.olora_init(ADAPTER)
        else:
            layer.pissa_init(ADAPTER, PISSA)
    except torch.linalg.LinAlgError as error:
        raise ConfigError(
            f"model.name: the weight of {name} cannot be decomposed (is it NaN or infinite?): {error}"
        ) from error


def save_trained(model: Any, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
    """Saves a full model, or an adapter for the original base; default weights, any shape: its own."""
    model.save_pretrained(str(folder), safe_serialization=True, state_dict=weights)
    start = getattr(model, "start_of_adapters", None)
    if start:
        _subtract_start(folder, start)


def _subtract_start(folder: Path, start: dict[str, Tensor]) -> None:
    """Gives the saved adapter twice the rank: B @ A - B0 @ A0 is [B, -B0] @ [A; A0]."""
    file = folder / WEIGHTS
    weights = load_file(file)
    for key, value in start.items():
        rank_axis, sign = (0, 1) if key.endswith("lora_A.weight") else (1, -1)
        weights[key] = torch.cat([weights[key].float(), sign * value], dim=rank_axis)
    with replacing_file(file) as complete:  # the weights are mapped from the file that it replaces
        save_file(weights, complete, metadata={"format": "pt"})
    config = LoraConfig.from_pretrained(str(folder))
    growth = 2**0.5 if config.use_rslora else 2  # of alpha, so that the scaling is the same
    config.r, config.lora_alpha = 2 * config.r, growth * config.lora_alpha  # type: ignore[assignment]
    config.rank_pattern = {name: 2 * rank for name, rank in config.rank_pattern.items()}
    config.alpha_pattern = {name: growth * alpha for name, alpha in config.alpha_pattern.items()}  # type: ignore[misc]
    config.save_pretrained(str(folder))
