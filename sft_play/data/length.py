"""How many tokens a row may have."""

from typing import TYPE_CHECKING

from sft_play.config.inputs import asked_name
from sft_play.config.schema import ModelConfig
from sft_play.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BLOCK_TOKENS = 2048  # length of rows of raw text if model.max_seq_len is auto
MAX_PLAUSIBLE_LENGTH = 10_000_000  # tokenizers without a limit report 1e30
MAX_UNSTATED = 2**20  # tokens of a row of a model that has no number of positions, such as Mamba


def require_supported(model: ModelConfig, positions: int | None) -> None:
    """Raises a ConfigError if model.max_seq_len exceeds the model's positions; None if they are unknown."""
    if model.max_seq_len != "auto":
        require_positions(
            f"model.max_seq_len={model.max_seq_len}", model.max_seq_len, model, positions, " or to auto"
        )


def require_positions(
    typed: str, asked: int, model: ModelConfig, positions: int | None, or_else: str = ""
) -> None:
    """Raises a ConfigError if a setting asks for longer rows than the model has positions for.

    `positions` is None if they are unknown; `or_else` is what the setting may be set to, too.
    """
    limit = positions or MAX_UNSTATED
    if asked <= limit:
        return
    name = asked_name(model.name)
    named = f"that '{name}' supports"
    if positions is None:
        named = f"allowed for '{name}', which does not say how many it supports"
    raise ConfigError(
        f"{typed} exceeds the {limit:,} positions {named}. Set it to at most {limit}"
        f"{',' if or_else else ''}{or_else}{_scaled(asked, positions)}"
    )


def _scaled(asked: int, positions: int | None) -> str:
    """What allows so many tokens, where positions are known."""
    if positions is None:
        return ""
    factor = -(-asked // positions)
    scaled = f"model.rope_scaling.rope_type=yarn model.rope_scaling.factor={factor}"
    return f", or scale its rotary positions: {scaled}"


def length_limit(
    model: ModelConfig, tokenizer: "PreTrainedTokenizerBase", positions: int | None
) -> int | None:
    """The length limit in tokens: of the config, else the model, else the tokenizer; None for no limit.

    Raises:
        ConfigError: the config asks for more than the model supports.
    """
    require_supported(model, positions)
    if model.max_seq_len != "auto":
        return model.max_seq_len
    is_limited = tokenizer.model_max_length < MAX_PLAUSIBLE_LENGTH
    return positions or (tokenizer.model_max_length if is_limited else None)


def block_tokens(model: ModelConfig, max_tokens: int | None) -> int:
    """The tokens of a row of raw text: model.max_seq_len, for "auto" BLOCK_TOKENS or the limit below it.

    Raises:
        ConfigError: rows of one token, in which there is nothing to predict.
    """
    longest = max_tokens or BLOCK_TOKENS
    if longest < 2:
        raise ConfigError(
            f"model.max_seq_len={longest} cuts raw text into rows of one token, in which no token can be "
            "predicted from those before it; set it to 2 or more"
        )
    return min(longest, BLOCK_TOKENS) if model.max_seq_len == "auto" else longest
