"""Chooses the attention implementation of a run, and whether its rows can be joined end to end."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.model import attention

# Layer types in which one token sees another through attention alone.
ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
# Compute capabilities that FlashAttention's packages are made for: from, and before.
FLASH_RUNS = {"flash_attention_2": ((8, 0), (13, 0)), "flash_attention_3": ((8, 0), (10, 0))}


def choose_attention(
    asked: str, config: PretrainedConfig, device: str, capability: attention.Capability | None = None
) -> str:
    """The attention implementation to use: the requested one, or for "auto" the fastest available.

    Args:
        asked: model.attention.
        config: the architecture.
        device: "cuda" or "cpu".
        capability: compute capability of the GPU; None if unknown.

    Raises:
        ConfigError: the device cannot run it, or transformers no longer says what its model supports.
    """
    if asked != "auto":
        _require_runnable(asked, device, capability)
        return asked
    text = config.get_text_config()
    model_class: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if model_class is not None and not hasattr(model_class, "_supports_sdpa"):
        raise ConfigError(
            f"model.attention=auto: {model_class.__name__} does not say whether it supports PyTorch's "
            "attention (_supports_sdpa), so this version of transformers is not supported: run "
            "`make install`, or set model.attention"
        )
    # the class of a model with code of its own is unknown before it is loaded
    supports_sdpa = model_class is not None and model_class._supports_sdpa
    # PyTorch's fused kernel has no soft-capped scores (Gemma 2) and no attention sinks (gpt-oss).
    plain_scores = getattr(text, "attn_logit_softcapping", None) is None
    package = _flash_package(capability) if device == "cuda" and torch.cuda.is_available() else None
    return package or (attention.NAME if supports_sdpa and plain_scores else "eager")


def _flash_package(capability: attention.Capability | None) -> str | None:
    """The newest FlashAttention that is installed here and made for a GPU; None if there is none.

    On Hopper also that of the hub, if the package `kernels` is installed and can get it.
    """
    known = capability or torch.cuda.get_device_capability()
    is_hopper = known[0] == 9
    if is_hopper and is_flash_attn_3_available(kernels_fallback_ok=True):
        return "flash_attention_3"
    runs = known >= FLASH_RUNS["flash_attention_2"][0]
    return "flash_attention_2" if runs and is_flash_attn_2_available() else None


def _require_runnable(asked: str, device: str, capability: attention.Capability | None) -> None:
    """Refuses FlashAttention on devices for which it is not made.

    Raises:
        ConfigError: the device cannot run it.
    """
    if asked not in FLASH_RUNS or (device == "cuda" and capability is None):
        return
    found = (
        "the CPU" if capability is None else f"a GPU of compute capability {capability[0]}.{capability[1]}"
    )
    runs = [
        name
        for name, (first, last) in FLASH_RUNS.items()
        if capability is not None and first <= capability < last
    ]
    if asked not in runs:
        raise ConfigError(
            f"model.attention={asked}: {found} cannot run it; "
            f"allowed here: {', '.join(['auto', attention.NAME, 'sdpa', 'eager', *runs])}"
        )


def joins_rows(
    config: RunConfig, architecture: PretrainedConfig, attention_name: str
) -> tuple[bool, list[str]]:
    """Whether rows can be joined end to end without seeing each other, and if not, the reason.

    Attention must know the boundaries of sequences: ours and FlashAttention do; masks would cost the square
    of all tokens. Layers that carry a state from token to token (Mamba, linear attention, convolutions) would
    carry it into the next row.
    """
    if config.train.packing:
        return True, []
    asked = config.train.padding_free
    if asked != "auto":
        return asked, [] if asked else ["rows are padded because train.padding_free=false"]
    if attention_name != attention.NAME and not attention_name.startswith("flash"):
        return False, [f"rows are padded: {attention_name} attention does not support row boundaries"]
    model_class: Any = AutoModelForCausalLM._model_mapping.get(type(architecture), None)
    if model_class is not None and not model_class._supports_attention_backend:
        return False, [f"rows are padded: {model_class.__name__} passes no row boundaries to its attention"]
    others = set(getattr(architecture.get_text_config(), "layer_types", None) or ()) - ATTENTION_LAYERS
    if others:
        return False, [f"rows are padded: layers of type {', '.join(sorted(others))} would mix them"]
    return True, []
