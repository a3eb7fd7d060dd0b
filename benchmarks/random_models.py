"""Models with random weights, created on the device from a config alone: no files, no hub."""

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.quantizers.auto import AutoHfQuantizer

from benchmarks.small_models import small_config
from sft_play.config.schema import TuningConfig
from sft_play.model.adapters import passes
from sft_play.model.adapters.attach import attach_adapter
from sft_play.model.attention import varlen
from sft_play.model.build import freeze_what_gets_no_gradient
from sft_play.model.layers import own_passes
from sft_play.model.layers.cpu import keep_differentiable
from sft_play.model.weights.four_bit import nf4
from sft_play.plan import Plan
from sft_play.sizing.step import StepSpec
from sft_play.upstream.patching import patched

MORE_NAMES = ("gemma2", "olmo3", "starcoder2", "cohere", "stablelm", "smollm3", "glm4", "exaone4")
TIED = ("llama", "qwen2", "qwen3", "gemma3_text", "mistral", "granite", "gpt2", "gemma2", "cohere", "smollm3")
OWN_HEAD_SIZE = ("gemma2", "glm4")  # whose heads are larger than this model unless the config says so


def draw_geometry(pick: random.Random, heads: int) -> dict[str, int]:
    """Sizes of a small model with so many heads, as `small_config` takes them."""
    return dict(
        hidden=32 * heads * pick.choice((1, 2)),
        inner=pick.choice((320, 448, 704, 1000)),
        heads=heads,
        groups=pick.choice([count for count in range(1, heads + 1) if heads % count == 0]),
        head_dim=32,
        vocabulary=pick.choice((1000, 2003, 4096, 6001)),
        layers=pick.randint(3, 7),
    )


def drawn_config(name: str, geometry: dict[str, int], *, tied: bool, **changes: Any) -> PretrainedConfig:
    """The config of an architecture with a drawn geometry."""
    if name in OWN_HEAD_SIZE:
        changes["head_dim"] = geometry["head_dim"]
    if name == "qwen3_moe":  # grouped products of 16 bits want rows of 16 bytes
        changes["moe_intermediate_size"] = geometry["inner"] // 16 * 8
    return small_config(name, geometry, tie_word_embeddings=tied, **changes)


@contextmanager
def stock_forwards() -> Iterator[None]:
    """Models and adapters that are made in the block compute as transformers and PEFT wrote them."""
    with patched(own_passes, "replace_forwards", lambda model, kernels="own": 0):
        with patched(passes, "replace_forwards", lambda model, *, autocast: None):
            yield


def random_base(
    config: PretrainedConfig,
    *,
    dtype: str,
    attn_implementation: str,
    device: torch.device,
    quantize: bool,
    kernels: str = "own",
) -> Any:
    """The same model as `sft_play.model.build.load_base` loads, with random weights.

    Args:
        config: the architecture.
        dtype: of the weights.
        attn_implementation: attention implementation.
        device: where the model is created.
        quantize: pack linear layers into 4 bits.
        kernels: as `train.kernels`.
    """
    varlen.register()
    with device:
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config),
            dtype=getattr(torch, dtype),
            attn_implementation=varlen.library_name(attn_implementation),
        )
    own_passes.replace_forwards(model, kernels)
    model.config.use_cache = False
    if quantize:
        quantize_linear_layers(model, getattr(torch, dtype))
    return model


def random_model(
    config: PretrainedConfig,
    spec: StepSpec | Plan,
    tuning: TuningConfig,
    device: torch.device,
) -> Any:
    """The model that the trainer would build for this step or plan, with adapters.

    Args:
        config: the architecture.
        spec: the step or plan.
        tuning: tuning mode and LoRA settings.
        device: where the model is created.
    """
    model = random_base(
        config,
        dtype=spec.precision.dtype,
        attn_implementation=spec.kernels.attention,
        device=device,
        quantize=tuning.mode == "qlora",
        kernels=spec.kernels.layers,
    )
    if tuning.mode == "full":
        freeze_what_gets_no_gradient(model)
        return model
    return attach_adapter(model, tuning.lora, autocast=spec.precision.autocast != "no")


def quantize_linear_layers(model: Any, dtype: torch.dtype) -> None:
    """Packs the linear layers into 4 bits, one after the other, as loading does."""
    dense = {name: module for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    quantizer = AutoHfQuantizer.from_config(nf4(model.config, dtype))
    quantizer._process_model_before_weight_loading(model, device_map=None)
    for name, module in model.named_modules():
        if isinstance(module, Linear4bit):
            plain = dense.pop(name)
            weight = Params4bit(plain.weight.data, requires_grad=False, **module.weight.__dict__)
            module.weight = weight.to(plain.weight.device)
            if plain.bias is not None:
                module.bias = torch.nn.Parameter(plain.bias.data, requires_grad=False)
    quantizer._process_model_after_weight_loading(model)
    keep_differentiable(model)
