"""What the planner asks about an architecture. Each answer takes transformers, so `Architecture` keeps them.

Arguments are all that an answer depends on besides the architecture; answers are JSON values.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from sft_play.model.attention_table import ATTENTIONS
from sft_play.sizing.step import StepSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def hidden_size(config: "PretrainedConfig") -> int:
    """The width of the decoder."""
    return config.get_text_config().hidden_size


def state_bytes(config: "PretrainedConfig", optimizer: str, device: str, elements: int) -> int:
    """As `optimizers.state_bytes`."""
    from sft_play.sizing.optimizers import state_bytes

    return state_bytes(StepSpec(mode="full", optimizer=optimizer, device=device), elements)


def position_limit(config: "PretrainedConfig") -> int | None:
    """As in `model.load`."""
    from sft_play.model.load import position_limit

    return position_limit(config)


def attention(config: "PretrainedConfig", asked: str, device: str, capability: tuple[int, int] | None) -> str:
    """As `choose_attention`; with a package it also depends on the GPU that is here."""
    from sft_play.model.attention_choice import choose_attention

    return choose_attention(asked, config, device, capability)


def has_attention_packages() -> bool:
    """Whether attention may come from a package, which is found out without importing it."""
    return any(find_spec(name) for row in ATTENTIONS.values() for name in row.modules)


def joined_rows(
    config: "PretrainedConfig", packing: bool, padding_free: Any, attention_name: str
) -> tuple[bool, list[str]]:
    """As `joins_rows`."""
    from sft_play.model.attention_choice import joins_rows

    return joins_rows(packing, padding_free, config, attention_name)


def attention_kernel(config: "PretrainedConfig", spec: StepSpec) -> str | None:
    """As `attention_sentence`."""
    from sft_play.sizing.attention_kernels import attention_sentence

    return attention_sentence(config, spec)


def packable(config: "PretrainedConfig") -> str:
    """As `require_packable`."""
    from sft_play.sizing.four_bit import require_packable

    return require_packable(config)


def trained_besides(config: "PretrainedConfig", tokens: int, modules: tuple[str, ...]) -> list[str]:
    """As in `sizing.trained`."""
    from sft_play.sizing.trained import trained_besides

    return trained_besides(config, tokens, modules)
