"""Pictures of rows that are not here: what one of some size becomes for a model, without its files."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_play.errors import ConfigError
from sft_play.spelling import var
from sft_play.upstream.transformers import class_since
from sft_play.vision.looks import NO_LOOK, TRAINED, Look, look_of
from sft_play.vision.recipes import KINDS, Unsuitable, recipe_with
from sft_play.vision.types import Fit

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SIZE = re.compile(r"([1-9]\d{0,4})\s*[x\u00d7*]\s*([1-9]\d{0,4})", re.IGNORECASE)  # width x height
FEWEST, MOST = 256**2, 4096**2  # pixels of a picture of Qwen3-VL and Qwen3.5
TILES = 4  # along the longest edge of a picture of SmolVLM, SmolVLM2 and Idefics3


@dataclass(frozen=True)
class DescribedPicture:
    """What a picture is to a model."""

    fit: Fit
    row_tokens: int  # of a row: those that stand for its features, and those around them
    look: Look  # of the model
    remedy: str = "data.image_max_pixels"  # what is set where rows are too long

    def overlong(self, asked: str) -> str:
        """What becomes of rows that are, as data.overlong asks: those with pictures are left out."""
        return "drop" if self.row_tokens else asked


NO_PICTURE = DescribedPicture(Fit(0, 0, 0, 0, 0, 0), 0, NO_LOOK, "data.overlong=truncate")


def pictures_asked(images: int | None, pixels: str | None) -> tuple[int, tuple[tuple[int, int], ...]]:
    """IMAGES of each row, and height and width of PIXELS; 0 and () without. ConfigError if one is wrong."""
    if (images is None) != (pixels is None):
        raise ConfigError(
            f"{var(IMAGES=None)}, of each row, and {var(PIXELS=None)}, their size, belong together: e.g. "
            f"{var(IMAGES=2, PIXELS='1024x768')}"
        )
    if images is None or pixels is None:
        return 0, ()
    if (found := SIZE.fullmatch(pixels.strip())) is None:
        raise ConfigError(f"{var(PIXELS=pixels)}: expected width x height, e.g. {var(PIXELS='1024x768')}")
    return images, ((int(found[2]), int(found[1])),)


def processor_settings(name: str) -> str:
    """Those of the image processor in a model's folder, as JSON; "" for a model of the Hub."""
    file = Path(name) / "preprocessor_config.json"
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def described_picture(
    config: "PretrainedConfig", settings: str, max_pixels: int | None, height: int, width: int
) -> DescribedPicture:
    """What a picture of this size, in pixels, becomes; `settings` as of `processor_settings`.

    Raises:
        ConfigError: the model takes no pictures, or none of this size.
    """
    if (look := look_of(config)) is NO_LOOK:
        raise ConfigError(f"rows with images are planned for {TRAINED}, and this is {config.model_type}")
    kind = KINDS[config.model_type]
    found = json.loads(settings) if settings else published_settings(config)
    try:
        recipe = recipe_with(kind, config, class_since(kind.since, kind.processor)(**found), max_pixels)
        fit = recipe.family.fit(height, width)
    except (ImportError, Unsuitable, ValueError) as problem:
        raise ConfigError(f"pictures of {width} x {height} pixels: {problem}") from None
    around = re.findall(r"<[^<>]+>|\n+", recipe.family.bare_text(fit))
    tokens = fit.tokens + len(around) - len(recipe.family.runs(fit))
    return DescribedPicture(fit, tokens, look)


def published_settings(config: "PretrainedConfig") -> Mapping[str, Any]:
    """Settings of the image processor that such a model is published with, as far as sizes depend on them."""
    vision, look = config.vision_config, look_of(config)
    if look.kind == "patches":
        names = ("patch_size", "temporal_patch_size")
        patches = {name: getattr(vision, name) for name in names} | {"merge_size": vision.spatial_merge_size}
        return {"size": {"shortest_edge": FEWEST, "longest_edge": MOST}, **patches}
    tile = vision.image_size
    if look.kind == "squares":
        return {"size": {"height": tile, "width": tile}}
    return {"size": {"longest_edge": TILES * tile}, "max_image_size": {"longest_edge": tile}}
