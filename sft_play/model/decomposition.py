"""Adapters that start as a part of the weights: PiSSA (arXiv 2404.02948) and OLoRA (arXiv 2406.01775).

A weight W becomes W - s * B0 @ A0, and its adapter starts with B0 and A0, so that the model is the same and
the principal part of W is trained. What is learned, s * (B @ A - B0 @ A0), is saved as an adapter of twice
the rank for the W that everybody has.

PEFT has both starts too, but rounds A0 and B0 to the type of the base after it has subtracted the exact ones,
and decomposes whole weights, which takes minutes for a large one. Here the cost grows with the rank.

Ranks need not find the same start bit for bit: DDP and DeepSpeed send the weights of rank 0 to all, and rank
0 saves its own start.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sft_play.config.schema import LoraSettings
from sft_play.errors import CheckpointError, ConfigError
from sft_play.files import replacing_file
from sft_play.report.progress import progress_bar
from sft_play.runlog import console
from sft_play.units import format_duration

if TYPE_CHECKING:
    from peft import PeftModel

START = "initial_adapter.safetensors"  # in a checkpoint: A0 and B0
WEIGHTS = "adapter_model.safetensors"
ADAPTER = "default"  # PEFT's name for the only one

# Singular vectors of matrices with more rows and columns than this are found by iteration: PEFT's "fast SVD"
# with 16 iterations, and a few more vectors than are kept, which makes these more exact (arXiv 0909.4061).
EXACT_UP_TO = 256
ITERATIONS, SPARE_VECTORS = 16, 8

SAID_FROM = 10  # seconds of work, after which a line says how long it took


def take_out_start(model: "PeftModel", lora: LoraSettings, saved: Path | None) -> None:
    """Starts the adapters with a part of the weights of their layers, which lose it.

    Args:
        model: with fp32 adapters, which are overwritten.
        lora: their settings, whose `init` is not the default.
        saved: file with the start of an earlier run, for the same base bit for bit; None to compute it.

    Raises:
        ConfigError: a rank is larger than a weight, or a weight is NaN or infinite.
        CheckpointError: the file does not fit the model.
    """
    layers = list(_adapted_layers(model))
    for name, layer in layers:
        _require_rank(name, layer, lora.init)
    if any(layer.get_base_layer().weight.is_meta for _, layer in layers):
        return
    starts = _read(saved) if saved else {}
    found: dict[str, Tensor] = {}
    began = time.monotonic()
    with progress_bar(f"{lora.init}: preparing the adapters", len(layers)) as advance:
        for name, layer in layers:
            keys = f"{name}.lora_A.weight", f"{name}.lora_B.weight"
            if saved and not all(key in starts for key in keys):
                raise CheckpointError(f"{saved} has no start of {name}; resume from another checkpoint")
            start = tuple(starts[key] for key in keys) if saved else _start_of(name, layer, lora.init)
            a, b = (value.contiguous() for value in start)  # as in the file, so that products are the same
            _take_out(layer, a, b)
            found |= {keys[0]: a.cpu(), keys[1]: b.cpu()}
            advance(1)
    model.start_of_adapters = found  # type: ignore[assignment]  # in RAM, for whoever saves
    if (seconds := time.monotonic() - began) > SAID_FROM:
        console().print(f"  {lora.init}: prepared {len(layers)} adapters in {format_duration(seconds)}")


def _require_rank(name: str, layer: Any, init: str) -> None:
    rank, shape = layer.r[ADAPTER], tuple(layer.get_base_layer().weight.shape)
    if rank > min(shape):
        raise ConfigError(
            f"tuning.lora.init={init} decomposes weights, and that of {name}, {shape[0]} x {shape[1]}, has "
            f"no rank {rank}; set tuning.lora.r, or the rank_pattern of that module, to {min(shape)} or less"
        )


def _adapted_layers(model: "PeftModel") -> Iterator[tuple[str, Any]]:
    """Name, as in saved adapters, and LoRA layer of each adapted layer."""
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name, module


def _weight(layer: Any) -> Tensor:
    """The weight of the base layer in fp32, [out, in]."""
    weight = layer.get_base_layer().weight.data.float()
    return weight.T if layer.fan_in_fan_out else weight


def _start_of(name: str, layer: Any, init: str) -> tuple[Tensor, Tensor]:
    """A0 [rank, in] and B0 [out, rank]."""
    weight, rank = _weight(layer), layer.r[ADAPTER]
    try:
        if init == "olora":
            q = torch.linalg.qr(weight[:, :rank]).Q  # the first columns of the whole Q
            return q.T @ weight, q
        u, sizes, v = principal_part(weight, rank)
    except torch.linalg.LinAlgError as error:
        raise ConfigError(
            f"model.name: the weight of {name} cannot be decomposed, as if it were NaN or infinite: {error}"
        ) from error
    roots = (sizes / layer.scaling[ADAPTER]).sqrt()
    return roots[:, None] * v.T, u * roots


def principal_part(weight: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The largest singular values of a matrix [out, in], and the vectors of each.

    Large matrices are decomposed by iteration, which draws the same numbers in any process.

    Returns:
        [out, rank], [rank] and [in, rank].

    Raises:
        torch.linalg.LinAlgError: the weight is not finite.
    """
    columns = rank + SPARE_VECTORS
    if min(weight.shape) <= max(EXACT_UP_TO, columns):
        u, sizes, vt = torch.linalg.svd(weight, full_matrices=False)
        return u[:, :rank], sizes[:rank], vt[:rank].T
    with torch.random.fork_rng([weight.device] if weight.is_cuda else []):
        torch.manual_seed(0)
        u, sizes, v = torch.svd_lowrank(weight, q=columns, niter=ITERATIONS)
    return u[:, :rank], sizes[:rank], v[:, :rank]


def _take_out(layer: Any, a: Tensor, b: Tensor) -> None:
    """W - scaling * B @ A in the type of W, and A and B as the adapter."""
    base, weight = layer.get_base_layer(), _weight(layer)
    rest = weight - (layer.scaling[ADAPTER] * b.to(weight.device)) @ a.to(weight.device)
    base.weight.data = (rest.T.contiguous() if layer.fan_in_fan_out else rest).to(base.weight.dtype)
    layer.lora_A[ADAPTER].weight.data.copy_(a)
    layer.lora_B[ADAPTER].weight.data.copy_(b)


def _read(saved: Path) -> dict[str, Tensor]:
    try:
        return load_file(saved)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{saved}, the start of the adapters, cannot be read: {error}; resume from another checkpoint"
        ) from error


def save_start(model: Any, folder: Path) -> None:
    """Writes the start of the adapters into a checkpoint, if it is a part of the weights."""
    start = getattr(model, "start_of_adapters", None)
    if start:
        save_file(start, folder / START)


def save_trained(model: Any, folder: Path) -> None:
    """Saves a full model, or an adapter for the original base."""
    model.save_pretrained(str(folder), safe_serialization=True)
    start = getattr(model, "start_of_adapters", None)
    if start:
        _subtract_start(folder, start)


def _subtract_start(folder: Path, start: dict[str, Tensor]) -> None:
    """Gives the saved adapter twice the rank: B @ A - B0 @ A0 is [B, -B0] @ [A; A0]."""
    from peft import LoraConfig

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
