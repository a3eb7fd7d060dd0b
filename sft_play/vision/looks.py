"""What config.json tells of how a model sees: names of its parts, and what its tower takes."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sft_play.vision.types import Fit

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
TRAINED_TYPES = PARTS.keys() - {"qwen3_5_moe"}  # that learn from images
TRAINED = "Qwen3-VL, Qwen3.5, Gemma 3, SmolVLM2 and Idefics3"  # the same, for a person


def seeing_parts(config: "PretrainedConfig") -> tuple[str, ...]:
    """Names of the modules that see, tower and projector, in a model; () if it is not known to see."""
    return PARTS.get(config.model_type, ())


def trained_parts(config: "PretrainedConfig", vision: str) -> tuple[str, ...]:
    """Those of them that `tuning.vision` lets be trained."""
    return () if vision == "frozen" else seeing_parts(config)


@dataclass(frozen=True)
class Look:
    """How the pixels of rows reach a model."""

    kind: Literal["none", "patches", "tiles", "squares"]
    unit_shape: tuple[int, ...]  # of the pixels of a patch, tile or square
    image_token: int
    unit_tokens: int  # of a tile or square; 1 of as many patches as are merged
    merged: int = 1  # patches along each side of a token
    table_side: int = 0  # of the square of positions that a tower has learned
    adds_to_layers: bool = False  # whether the first layers get features of pictures too

    @property
    def smallest(self) -> Fit:
        """A picture of as few tokens as there can be."""
        if self.kind == "patches":
            return Fit(0, 0, self.merged, self.merged, self.merged**2, 1)
        _, height, width = self.unit_shape
        return Fit(height, width, 0, 0, 1, self.unit_tokens)

    @property
    def unit_bytes(self) -> int:
        """Of a patch or tile in a batch: of its pixels, and of its places in `tower_inputs`."""
        pixels = 4 * math.prod(self.unit_shape)
        if self.kind != "patches":
            return pixels
        return pixels + 2 * 8 + 4 * 8 + 4 * 4

    @property
    def token_bytes(self) -> int:
        """Of a token in a batch with pictures: id, label and positions."""
        return 8 * (2 + (4 if self.kind == "patches" else 1))


NO_LOOK = Look("none", (), -1, 0)


def look_of(config: "PretrainedConfig") -> Look:
    """That of a model; NO_LOOK if it learns from text alone."""
    if config.model_type not in TRAINED_TYPES:
        return NO_LOOK
    vision, token = config.vision_config, config.image_token_id
    if seeing_parts(config) == QWEN:
        pixels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        table, adds = math.isqrt(vision.num_position_embeddings), config.model_type == "qwen3_vl"
        return Look("patches", (pixels,), token, 1, vision.spatial_merge_size, table, adds)
    unit = vision.num_channels, vision.image_size, vision.image_size
    if config.model_type == "gemma3":
        return Look("squares", unit, token, config.mm_tokens_per_image)
    return Look("tiles", unit, token, (vision.image_size // vision.patch_size // config.scale_factor) ** 2)
