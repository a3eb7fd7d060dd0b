"""Which architectures cannot be trained here, found out from config.json alone."""

from typing import TYPE_CHECKING

from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from sft_play.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ALLOWED = (
    "SFT-Play trains decoder-only language models (Llama, Qwen, Gemma, Mistral and others: docs/models.md)"
)
# Encoders that fill in no masks, and prompts that each token sees as a whole: config.json does not say so.
SEE_BOTH_WAYS = {"bert-generation", "cpmant", "xlnet"}
# Heads with more than a matrix and the scales that our loss knows; `train.verify.check_head` finds others.
OTHER_HEADS = {"inkling_text", "modernbert-decoder"}


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
