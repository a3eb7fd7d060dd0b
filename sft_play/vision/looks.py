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
JOINED = ("qwen3_vl", "smolvlm", "idefics3")  # whose rows with pictures are joined end to end
TRAINED = "Qwen3-VL, SmolVLM2 and Idefics3"  # the same, for a person


def seeing_parts(config: "PretrainedConfig") -> tuple[str, ...]:
    """Names of the modules that see, tower and projector, in a model; () if it is not known to see."""
    return PARTS.get(config.model_type, ())


def trained_parts(config: "PretrainedConfig", vision: str) -> tuple[str, ...]:
    """Those of them that `tuning.vision` lets be trained."""
    return () if vision == "frozen" else seeing_parts(config)


@dataclass(frozen=True)
class Look:
    """How the pixels of joined rows reach a model."""

    kind: Literal["patches", "tiles"]
    unit_shape: tuple[int, ...]  # of the pixels of a patch or tile
    image_token: int
    unit_tokens: int  # of a tile; 1 of as many patches as are merged
    merged: int = 1  # patches along each side of a token
    table_side: int = 0  # of the square of positions that a tower has learned

    @property
    def adds_to_layers(self) -> bool:
        """Whether the first layers get features of pictures too."""
        return self.kind == "patches"

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

    @classmethod
    def of(cls, config: "PretrainedConfig") -> "Look | None":
        """That of a model; None if its rows with pictures cannot be joined."""
        if config.model_type not in JOINED:
            return None
        vision = config.vision_config
        if config.model_type == "qwen3_vl":
            pixels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
            table = math.isqrt(vision.num_position_embeddings)
            return cls("patches", (pixels,), config.image_token_id, 1, vision.spatial_merge_size, table)
        side, tokens = vision.image_size, vision.image_size // vision.patch_size // config.scale_factor
        return cls("tiles", (vision.num_channels, side, side), config.image_token_id, tokens**2)
