"""Chooses the attention implementation of a run, and whether layers let its rows be joined end to end."""

import inspect
import sys
from types import ModuleType
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.utils import import_utils

from sft_play.choices.kernels import Capability, within
from sft_play.errors import ConfigError
from sft_play.model.architecture.families import family_of
from sft_play.model.architecture.shape import setting
from sft_play.model.attention.table import ATTENTIONS, NAME, Attention
from sft_play.reasons.method import Padded
from sft_play.spelling import make
from sft_play.units import SIXTEEN_BIT
from sft_play.upstream.transformers import classes_by_config, supports

# Layer types in which one token sees another through attention alone, as our function computes it.
ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
DROPOUT_NAMES = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob")
WIDEST = 256  # heads that FlashAttention computes


def choose_attention(
    asked: str,
    config: PretrainedConfig,
    device: str,
    capability: Capability | None = None,
    dtype: str | None = None,
) -> str:
    """The attention implementation to use: the requested one, or for "auto" ours.

    No proof on a GPU has seen a package win against ours, so "auto" takes one only for models whose attention
    ours does not compute. The compute capability of the GPU, and the type that attention computes in, may be
    unknown.

    Raises:
        ConfigError: the device cannot run it, it cannot compute what the model or the run asks for, or
            transformers no longer says what its model supports.
    """
    model_class = _class_of(config)
    if asked != "auto":
        _require_runnable(asked, device, capability)
        _require_supported(asked, config)
        if problem := _unfit(asked, config, dtype):
            raise ConfigError(f"model.attention={asked}: {problem}, or set model.attention=auto")
        return asked
    if model_class is not None and supports(model_class, "sdpa") is None:
        raise ConfigError(
            f"model.attention=auto: {model_class.__name__} does not say whether it supports PyTorch's "
            "attention (_supports_sdpa), so this version of transformers is not supported: run "
            f"`{make('install')}`, or set model.attention"
        )
    plain = generation_attention(config)
    if calls_ours(config) and (plain == "sdpa" or has_sinks(config)):
        return NAME
    takes_packages = model_class is not None and supports(model_class, "flash_attn")
    if takes_packages and device == "cuda" and torch.cuda.is_available():
        known = capability or torch.cuda.get_device_capability()
        for name, row in reversed(ATTENTIONS.items()):  # the newest first
            if within(known, row.preferred) and not _unfit(name, config, dtype) and is_installed(row):
                return name
    return plain


def generation_attention(config: PretrainedConfig) -> str:
    """PyTorch's attention where the model supports it, which works with a cache as ours does not; else eager.

    PyTorch's fused kernel has no soft-capped scores (Gemma 2). The class of a model with code of its own is
    unknown before it is loaded.
    """
    model_class = _class_of(config)
    supports_sdpa = model_class is not None and supports(model_class, "sdpa")
    plain_scores = getattr(config.get_text_config(), "attn_logit_softcapping", None) is None
    return "sdpa" if supports_sdpa and plain_scores else "eager"


def _require_supported(asked: str, config: PretrainedConfig) -> None:
    """Refuses attention that a known architecture does not support."""
    model_class = _class_of(config)
    if model_class is None:
        return
    lacks_ours = asked == NAME and not calls_ours(config)
    lacks_sdpa = asked == "sdpa" and not supports(model_class, "sdpa")
    lacks_package = ATTENTIONS[asked].is_package and not supports(model_class, "flash_attn")
    if lacks_ours or lacks_sdpa or lacks_package:
        raise ConfigError(
            f"model.attention={asked}: {model_class.__name__} does not support it; allowed for it: auto, "
            f"eager or {choose_attention('auto', config, 'cpu')}"
        )


def _class_of(config: PretrainedConfig) -> Any:
    """The class of the causal language model; None if its code is its own."""
    return classes_by_config(AutoModelForCausalLM).get(type(config), None)


def _modeling_files(config: PretrainedConfig) -> list[ModuleType]:
    """The modules of transformers that define the model and its text part."""
    classes = [_class_of(part) for part in (config, config.get_text_config())]
    return [sys.modules[found.__module__] for found in classes if found is not None]


def calls_ours(config: PretrainedConfig) -> bool:
    """Whether the layers call the attention function that is registered, and leave the mask to it.

    Falcon's and others have classes of their own. Sparse and chunked attention (DeepSeek V3.2, Llama 4) read
    a mask that the library makes for its own functions, whose names they know.
    """
    text = config.get_text_config()
    others = set(getattr(text, "layer_types", None) or ()) - ATTENTION_LAYERS - {"linear_attention"}
    if family_of(text).own_masks or any(kind.endswith("_attention") for kind in others):
        return False
    sources = [inspect.getsource(module) for module in _modeling_files(config)]
    knows_functions = any("_attn_implementation in (" in source for source in sources)
    return any("ALL_ATTENTION_FUNCTIONS" in source for source in sources) and not knows_functions


def attention_dropout(config: PretrainedConfig) -> float:
    """The dropout of attention weights, which architectures call by several names."""
    text = config.get_text_config()
    return max(setting(text, name) or 0.0 for name in DROPOUT_NAMES)


def _unfit(name: str, config: PretrainedConfig, dtype: str | None) -> str | None:
    """What a package cannot compute of the model or the run, and what to change; None if nothing."""
    row, text = ATTENTIONS[name], config.get_text_config()
    if not row.is_package:
        return None
    heads = setting(text, "num_attention_heads")
    width = setting(text, "head_dim") or (text.hidden_size // heads if heads else 0)
    dropout = attention_dropout(config)
    if dtype is not None and dtype not in SIXTEEN_BIT:
        return f"it computes in 16 bits, and this run in {dtype}; set train.mixed_precision=bf16 or fp16"
    if width > WIDEST:
        return f"it supports heads of at most {WIDEST} values, and {text.model_type} has {width}"
    if has_sinks(config):
        return f"the layers of {text.model_type} have attention sinks, which it would ignore"
    if dropout and not row.dropout:
        return f"it has no dropout, but {text.model_type} has attention dropout {dropout:g}"
    return None


def has_sinks(config: PretrainedConfig) -> bool:
    """Whether the layers hand attention sinks to the function that they call (gpt-oss)."""
    return any("s_aux=" in inspect.getsource(module) for module in _modeling_files(config))


def is_installed(row: Attention) -> bool:
    """Whether a package is installed here, or that of the Hub can be had through the package `kernels`."""
    from_hub = "kernels" in row.modules
    return bool(getattr(import_utils, row.available)(**({"kernels_fallback_ok": True} if from_hub else {})))


def _require_runnable(asked: str, device: str, capability: Capability | None) -> None:
    """Refuses a package on devices for which it is not made."""
    if not ATTENTIONS[asked].is_package or (device == "cuda" and capability is None):
        return
    packages = [name for name, row in ATTENTIONS.items() if capability and within(capability, row.gpus)]
    runs = [name for name, row in ATTENTIONS.items() if not row.is_package or name in packages]
    if asked not in runs:
        found = "the CPU" if capability is None else "a GPU of compute capability {}.{}".format(*capability)
        raise ConfigError(
            f"model.attention={asked}: {found} cannot run it; allowed here: {', '.join(['auto', *runs])}"
        )


def why_rows_mix(architecture: PretrainedConfig) -> Padded | None:
    """Why joined rows would see each other, whatever the attention; None if they would not.

    Layers that carry a state from token to token (Mamba, linear attention, convolutions) would carry it into
    the next row.
    """
    model_class = _class_of(architecture)
    if model_class is not None and (
        not supports(model_class, "attention_backend") or family_of(architecture).loses_boundaries
    ):
        return Padded("boundaries", model_class.__name__)
    others = set(getattr(architecture.get_text_config(), "layer_types", None) or ()) - ATTENTION_LAYERS
    return Padded("layers", ", ".join(sorted(others))) if others else None
