"""Which architectures cannot be trained here, found out from config.json alone."""

from typing import TYPE_CHECKING, Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, __version__
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from sft_play.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ALLOWED = (
    "SFT-Play trains decoder-only language models "
    "(Llama, Qwen, Gemma, Mistral and others; see docs/reference/models.md)"
)
# Encoders that fill in no masks, and prompts that each token sees as a whole: config.json does not say so.
SEE_BOTH_WAYS = {"bert-generation", "cpmant", "xlnet"}
# Heads with more than a matrix and the scales that our loss knows; `train.verify.check_head` finds others.
OTHER_HEADS = {"inkling_text", "modernbert-decoder"}
# Of these, only the text part is loaded: to build the whole model takes a package that training does without.
TEXT_ALONE = {"gemma3n"}
# They continue what another model has computed, and have no text of their own.
DRAFTS = {"gemma4_assistant", "gemma4_unified_assistant"}
# Their layers are run backwards, instead of a graph that autograd keeps.
NO_GRAPH = {"reformer"}


def require_decoder(config: "PretrainedConfig") -> None:
    """Checks that a model predicts each token of a text from those before it, and from nothing else.

    Raises:
        ConfigError: it does not; says what it is.
    """
    kind = config.model_type
    if config.is_encoder_decoder or kind == "trocr":
        raise ConfigError(f"model.name: {kind} is an encoder-decoder; {ALLOWED}")
    is_encoder = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES or kind in SEE_BOTH_WAYS
    if is_encoder and not getattr(config, "is_decoder", False):
        raise ConfigError(
            f"model.name: {kind} reads texts in both directions, so each token would see what it is to "
            f"predict; {ALLOWED}"
        )
    if kind in DRAFTS:
        raise ConfigError(
            f"model.name: {kind} drafts tokens for another model and computes nothing without it; {ALLOWED}"
        )
    if kind in NO_GRAPH:
        raise ConfigError(
            f"model.name: {kind} computes its gradients by itself, and none for adapters; {ALLOWED}"
        )
    if kind in OTHER_HEADS:
        raise ConfigError(
            f"model.name: {kind} has an output head that the loss here does not know; {ALLOWED}"
        )
    if getattr(config, "vision_config", None) is not None and config.get_text_config() is config:
        raise ConfigError(
            f"model.name: {kind} describes images, and its text part is none of its own; {ALLOWED}"
        )
    if not isinstance(getattr(config.get_text_config(), "hidden_size", None), int):
        raise ConfigError(f"model.name: {kind} has no single width, so it is no plain decoder; {ALLOWED}")
    know_multimodal(config)
    has_own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if type(config) not in AutoModelForCausalLM._model_mapping and not has_own_code:
        raise ConfigError(
            f"model.name: {kind} is no language model, as far as transformers {__version__} knows; {ALLOWED}"
        )


def know_multimodal(config: "PretrainedConfig") -> None:
    """Lets `AutoModelForCausalLM` build a model that reads images too, whose text part is trained.

    For some of them transformers itself does so (Gemma 3, Llama 4), for others not (Qwen-VL, Mistral 3).
    """
    kind, known = type(config), AutoModelForCausalLM._model_mapping
    multimodal = AutoModelForImageTextToText._model_mapping
    if config.model_type in TEXT_ALONE:
        known.register(kind, known[type(config.get_text_config())], exist_ok=True)
    elif kind in multimodal and kind not in known:
        known.register(kind, multimodal[kind], exist_ok=True)  # otherwise it ignores its own configs


def class_to_name(config: "PretrainedConfig") -> str | None:
    """The class that loads the model as it is trained here; None if `AutoModelForCausalLM` takes it."""
    found: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    usual = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    return None if found is None or found.__name__ == usual else found.__name__
