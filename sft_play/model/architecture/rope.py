"""model.rope_scaling: rotary positions for rows that are longer than those that a model was trained on."""

import copy
import sys
from typing import TYPE_CHECKING, Any, get_args

from sft_play.config.schema import ModelConfig, RopeScaling, RopeType
from sft_play.errors import ConfigError
from sft_play.upstream.transformers import classes_by_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAME = "model.rope_scaling"
WINDOWED = "sliding"  # in the names of kinds of layers whose tokens are never further apart than in training


def with_rope_scaling(config: "PretrainedConfig", model: ModelConfig) -> "PretrainedConfig":
    """The architecture with the positions that model.rope_scaling asks for; the same one without it.

    Raises:
        ConfigError: it has no rotary positions, or was trained with others that would be replaced.
    """
    asked = model.rope_scaling
    if asked is None:
        return config
    scaled = copy.deepcopy(config)
    text = scaled.get_text_config()
    own, positions = _rotary(text), text.max_position_embeddings
    grown: set[int] = set()
    for parameters in own:
        grown.add(_scale(parameters, asked, positions, model.name))
    text.max_position_embeddings = max(grown)
    text.validate_rope()
    return scaled


def _rotary(text: "PretrainedConfig") -> list[dict[str, Any]]:
    """The settings of rotary positions that rows beyond the model's positions depend on, to be changed.

    Layers with a sliding window are left as they are: their tokens stay as near as they were in training.
    """
    found = getattr(text, "rope_parameters", None) or {}
    if not found or not getattr(text, "max_position_embeddings", None) or not _reads_rope_type(text):
        raise ConfigError(
            f"{NAME}: {text.model_type} has no rotary positions that transformers can scale; leave it out"
        )
    nested = {kind: own for kind, own in found.items() if isinstance(own, dict)}  # by kind of layer
    kinds = [own for kind, own in nested.items() if own and WINDOWED not in kind] if nested else [found]
    if not kinds:
        raise ConfigError(f"{NAME}: no layer of {text.model_type} has rotary positions without a window")
    return kinds


def _reads_rope_type(text: "PretrainedConfig") -> bool:
    """Whether the code of the architecture looks the type up, as nearly all do."""
    from transformers import AutoModel

    classes: Any = classes_by_config(AutoModel).get(type(text), None)
    first = classes[0] if isinstance(classes, tuple) else classes
    return first is not None and hasattr(sys.modules[first.__module__], "ROPE_INIT_FUNCTIONS")


def _scale(parameters: dict[str, Any], asked: RopeScaling, positions: int, name: str) -> int:
    """Changes the settings of one kind of layer; returns how many positions they then have."""
    kind, factor = parameters.get("rope_type") or "default", parameters.get("factor") or 1.0
    original = asked.original_max_position_embeddings
    if original and (asked.rope_type != "yarn" or kind != "default"):
        raise ConfigError(
            f"{NAME}: original_max_position_embeddings applies only to yarn, with a model that is "
            "not scaled already"
        )
    if kind == "default" and asked.rope_type == "llama3":
        raise ConfigError(f"{NAME}: '{name}' was not trained with rope_type=llama3; use yarn or linear")
    if kind not in ("default", asked.rope_type):
        double = f"{{rope_type: {kind}, factor: {2 * factor:g}}} gives twice its positions"
        raise ConfigError(
            f"{NAME}: '{name}' was trained with rope_type={kind}, which {asked.rope_type} would replace; "
            f"{double if kind in get_args(RopeType) else 'leave it out, or use another model'}"
        )
    if kind != "default" and asked.factor <= factor:
        raise ConfigError(
            f"{NAME}: '{name}' has factor {factor:g} already, for its {positions:,} positions; set a larger "
            "one"
        )
    if asked.rope_type == "yarn" and kind == "default":
        parameters["original_max_position_embeddings"] = original or positions
    parameters |= {"rope_type": asked.rope_type, "factor": asked.factor}
    return round((original or positions) * asked.factor / factor)
