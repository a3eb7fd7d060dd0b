"""What the planner asks about an architecture. Each answer takes transformers, so `Architecture` keeps them.

Arguments are all that an answer depends on besides the architecture; answers are JSON values.
"""

from dataclasses import astuple
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


def why_padded(
    config: "PretrainedConfig", packing: bool, padding_free: Any, attention_name: str
) -> tuple[Any, ...] | None:
    """The fields of a `Padded`, as in `model.attention_choice`."""
    from sft_play.model.attention_choice import why_padded

    return _fields(why_padded(packing, padding_free, config, attention_name))


def attention_kernel(config: "PretrainedConfig", spec: StepSpec) -> tuple[Any, ...] | None:
    """The fields of an `AttentionKernel`, as in `sizing.attention_kernels`."""
    from sft_play.sizing.attention_kernels import attention_kernel

    return _fields(attention_kernel(config, spec))


def packable(config: "PretrainedConfig") -> tuple[Any, ...]:
    """The fields of a `FourBitBase`, as in `sizing.parameters`."""
    from sft_play.sizing.parameters import require_packable

    return astuple(require_packable(config))


def trained_besides(
    config: "PretrainedConfig", tokens: int, modules: tuple[str, ...]
) -> tuple[tuple[Any, ...] | None, tuple[Any, ...] | None]:
    """The fields of a `NewTokens` and of a `TrainedWhole`, as in `sizing.parameters`."""
    from sft_play.sizing.parameters import trained_besides

    new_tokens, whole = trained_besides(config, tokens, modules)
    return _fields(new_tokens), _fields(whole)


def _fields(reason: Any) -> Any:
    return None if reason is None else astuple(reason)
