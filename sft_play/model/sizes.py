"""Checks the sizes in a model's config.json, before anything is built from them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sft_play.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)
MOST, MOST_LAYERS = 2**28, 2_000  # far above any published model


def require_few_layers(tree: Mapping[str, Any], name: str) -> None:
    """Checks the number of layers in the content of config.json: architectures make a list of them at once.

    Raises:
        ConfigError: there are too many.
    """
    for key, value in tree.items():
        if isinstance(value, Mapping):
            require_few_layers(value, name)
        elif "layer" in str(key) and isinstance(value, int) and value > MOST_LAYERS:
            raise _wrong(name, f"{key} is {value:.3g}; expected at most {MOST_LAYERS:,}")


def require_sound_sizes(config: "PretrainedConfig", name: str) -> None:
    """Checks that the sizes are numbers in a sensible range, and that the attention heads divide.

    Args:
        config: of the model.
        name: of the model, for the message.

    Raises:
        ConfigError: one of them is wrong.
    """
    text = config.get_text_config()
    found = {size: setting(text, size) for size in SIZES}
    # some architectures have one size per layer, and leave out what does not apply to them
    sizes = {size: value for size, value in found.items() if value is not None and not _is_list(value)}
    for size, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MOST:
            raise _wrong(name, f"{size} is {value!r:.40}; expected a whole number from 1 to {MOST:,}")
    hidden, heads, groups = (sizes.get(size) for size in SIZES[:1] + SIZES[3:5])
    if hidden and heads and not sizes.get("head_dim") and hidden % heads:
        raise _wrong(name, f"hidden_size {hidden} is not divisible by num_attention_heads {heads}")
    if heads and groups and heads % groups:
        raise _wrong(name, f"num_attention_heads {heads} is not divisible by num_key_value_heads {groups}")


def setting(text: "PretrainedConfig", name: str, default: Any = None) -> Any:
    """A setting of the text part; the default if it has none, or one per layer (Gemma 4's head_dim)."""
    try:
        return getattr(text, name, default)
    except RuntimeError:  # transformers' AmbiguousGlobalPerLayerAttributeError
        return default


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple))


def _wrong(name: str, what: str) -> ConfigError:
    return ConfigError(f"model.name: config.json of '{name}': {what}\ndownload or save the model again")
