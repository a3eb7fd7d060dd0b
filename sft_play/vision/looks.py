"""What config.json tells of how a model sees."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

QWEN, TILED = ("model.visual",), ("model.vision_model", "model.connector")
PARTS: dict[str, tuple[str, ...]] = {
    "qwen3_vl": QWEN,
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN,
    "smolvlm": TILED,
    "idefics3": TILED,
    "gemma3": ("model.vision_tower", "model.multi_modal_projector"),
}


def seeing_parts(config: "PretrainedConfig") -> tuple[str, ...]:
    """Names of the modules that see, tower and projector, in a model; () if it is not known to see."""
    return PARTS.get(config.model_type, ())
