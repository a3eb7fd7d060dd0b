"""Where a model is put to generate with: on one GPU, or spread over all of them and then RAM, by accelerate.

No machine with several GPUs has run this. Which layer goes where is up to transformers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from transformers import PreTrainedModel
from transformers.integrations.accelerate import compute_module_sizes
from transformers.quantizers.auto import AutoHfQuantizer

from sft_play.config.schema import ModelConfig
from sft_play.errors import DoesNotFitError
from sft_play.machine.gpus import detect
from sft_play.model.load import empty_base
from sft_play.model.weights.four_bit import nf4
from sft_play.ui.console import console
from sft_play.units import counted, format_bytes
from sft_play.upstream.transformers import undivided

IN_RAM = "cpu"  # device of layers that are copied to a GPU at each pass
SPREAD = "auto"  # transformers' word for all visible GPUs, and what they do not hold, RAM


def place(
    weights: int, gpus: Sequence[int | None], ram: int | None, *, quantized: bool
) -> torch.device | str:
    """What `load_base` takes as device: the first GPU, or SPREAD if the weights do not fit there.

    All in bytes: of the weights in the type of use, and free on each visible GPU and in RAM, where None is
    unknown and counts as enough. Weights that are `quantized`, in 4 bits, bitsandbytes holds on GPUs only.

    Raises:
        DoesNotFitError: they do not fit all GPUs and RAM together.
    """
    known = [free for free in gpus if free is not None]
    if len(known) < len(gpus) or ram is None or weights <= known[0]:
        return torch.device("cuda", 0)
    room = sum(known)
    free = f"{format_bytes(room)} on {counted(len(gpus), 'GPU')}"
    if not quantized:
        room, free = room + ram, f"{free} and {format_bytes(ram)} of RAM"
    if weights > room:
        needed = format_bytes(weights)
        raise DoesNotFitError(
            f"the weights need {needed}, but only {free} are free; free more, or use a larger machine"
        )
    return SPREAD


def choose_place(model: ModelConfig, dtype: str, *, quantize: bool) -> torch.device | str:
    """Where a model goes on this machine, as of `place`; on one without GPUs, to the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    empty, machine = empty_base(model, dtype=getattr(torch, dtype)), detect()
    if getattr(empty.config, "quantization_config", None) is not None:
        return torch.device("cuda", 0)  # published so: what it takes is not known
    try:
        weights = weight_bytes(empty, quantize=quantize)
    except ImportError:
        return torch.device("cuda", 0)  # `load_base` says what is missing
    free = [gpu.free_bytes for gpu in machine.gpus] or [None]
    return place(weights, free, machine.host.ram_free_bytes, quantized=quantize)


def weight_bytes(empty: PreTrainedModel, *, quantize: bool) -> int:
    """Bytes of a model in its type; with `quantize`, linear layers are counted in 4 bits, without scales."""
    quantizer: Any = (
        AutoHfQuantizer.from_config(nf4(empty.config, empty.dtype), pre_quantized=False) if quantize else None
    )
    if quantizer:
        quantizer.preprocess_model(empty, device_map=None)
    return int(compute_module_sizes(empty, quantizer)[0][""])


def spread_text(places: Mapping[str, Any], layers: Sequence[str]) -> str:
    """What a device map, module name -> device, means for the layers, which transformers leaves whole."""
    gpus = {str(device) for device in places.values() if device != IN_RAM}
    text = f"spread over {counted(len(gpus), 'GPU')}"
    away = [name for name, device in places.items() if device == IN_RAM]
    if not away:
        return text
    slow = [layer for layer in layers if _touches(layer, away)]
    return f"{text}; {len(slow)} of {counted(len(layers), 'layer')} stay in RAM: slow"


def _touches(layer: str, modules: Sequence[str]) -> bool:
    """Whether the layer is one of the modules, within one, or has one within it."""
    dotted = [f"{module}." for module in modules]
    return any(f"{layer}.".startswith(module) or module.startswith(f"{layer}.") for module in dotted)


def say_spread(model: PreTrainedModel) -> None:
    """Prints where the layers of a loaded model are, if it is on several devices.

    Raises:
        DoesNotFitError: transformers found that some stay in their files.
    """
    places: dict[str, Any] = getattr(model, "hf_device_map", {})
    if "disk" in places.values():
        raise DoesNotFitError(
            "the weights do not fit on the GPUs and in RAM; free more memory, or use a larger machine"
        )
    if len(set(places.values())) > 1:
        kinds: Any = undivided(model)
        layers = [name for name, module in model.named_modules() if type(module).__name__ in kinds]
        console().print(f"  {spread_text(places, layers)}")


def places_for_adapter(base: PreTrainedModel) -> dict[str, Any]:
    """Arguments with which PEFT leaves a model where it is; it would place one with layers in RAM anew."""
    places = getattr(base, "hf_device_map", None) or {}
    if IN_RAM not in places.values() or len(set(places.values())) == 1:
        return {}
    return {"device_map": {f"base_model.model.{name}": device for name, device in places.items()}}


def compute_head_in_ram(model: PreTrainedModel) -> None:
    """Lets an output head whose weights stay in RAM compute there: its weights are asked for from outside."""
    head = model.get_output_embeddings()
    if head.weight.is_meta:
        remove_hook_from_module(head)
        add_hook_to_module(head, AlignDevicesHook("cpu", io_same_device=True))
