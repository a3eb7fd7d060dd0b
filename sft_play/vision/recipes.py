"""A model's config and the settings of its image processor -> how it takes pictures, or why it takes none."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isqrt
from typing import TYPE_CHECKING, Any

from sft_play.config.inputs import asked_name
from sft_play.errors import ConfigError, first_line
from sft_play.upstream.transformers import class_since
from sft_play.vision.families import OneSize, Patches, Recipe, Tiles
from sft_play.vision.looks import TRAINED

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

Settings = Mapping[str, Any]


class Unsuitable(Exception):
    """Why pictures cannot be used with a model, in a sentence."""


def _patches(config: "PretrainedConfig", settings: Settings, max_pixels: int | None) -> Patches:
    vision, size = config.vision_config, settings["size"]
    side, merged, frames = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
    found = tuple(settings[name] for name in ("patch_size", "merge_size", "temporal_patch_size"))
    if found != (side, merged, frames):
        raise Unsuitable(f"its image processor makes patches of {found}, and it takes {side, merged, frames}")
    fewest, most = size["shortest_edge"], size["longest_edge"]
    _require_enough(max_pixels, fewest)
    return Patches(side, merged, frames, fewest, min(most, max_pixels or most))


def _tiles(config: "PretrainedConfig", settings: Settings, max_pixels: int | None) -> Tiles:
    side, longest = settings["max_image_size"].get("longest_edge"), settings["size"].get("longest_edge")
    if not side or not longest or not settings["do_pad"]:
        raise Unsuitable("its image processor has other sizes than longest edges, or does not pad")
    _require_enough(max_pixels, side**2)
    if max_pixels:
        longest = min(longest, isqrt(max_pixels) // side * side)
    tokens = (side // config.vision_config.patch_size) ** 2 // config.scale_factor**2
    return Tiles(side, tokens, longest, settings["do_image_splitting"])


def _one_size(config: "PretrainedConfig", settings: Settings, max_pixels: int | None) -> OneSize:
    side = config.vision_config.image_size
    if settings["size"] != {"height": side, "width": side}:
        raise Unsuitable(f"its image processor makes pictures of {settings['size']}, and it takes {side}")
    if settings.get("do_pan_and_scan"):
        raise Unsuitable("its image processor crops pictures (do_pan_and_scan), which is not supported")
    _require_enough(max_pixels, side**2)
    return OneSize(side, config.mm_tokens_per_image)


def _require_enough(max_pixels: int | None, fewest: int) -> None:
    if max_pixels is not None and max_pixels < fewest:
        raise ConfigError(
            f"data.image_max_pixels={max_pixels} is less than the {fewest:,} pixels that this model gives "
            "each picture at least; raise it, or remove it"
        )


@dataclass(frozen=True)
class Kind:
    """What models of a type have in common."""

    processor: str
    family: Callable[["PretrainedConfig", Settings, int | None], Patches | Tiles | OneSize]
    names: Mapping[str, str]  # field of the family -> attribute of a tokenizer with another name of its token
    since: str = "5.17"  # of transformers


_QWEN = {"image": "image_token", "begin": "vision_start_token", "end": "vision_end_token"}
_SMOLVLM = {"image": "image_token", "between": "fake_image_token", "whole": "global_image_token"}
_GEMMA = {"image": "image_token", "begin": "boi_token", "end": "eoi_token"}
QWEN = Kind("Qwen2VLImageProcessorPil", _patches, _QWEN)
SMOLVLM = Kind("SmolVLMImageProcessorPil", _tiles, _SMOLVLM, "5.21")
GEMMA = Kind("Gemma3ImageProcessorPil", _one_size, _GEMMA)
KINDS = {
    "qwen3_vl": QWEN,
    "qwen3_5": QWEN,
    "smolvlm": SMOLVLM,
    "idefics3": replace(SMOLVLM, processor="Idefics3ImageProcessorPil"),
    "gemma3": GEMMA,
}


def recipe_for(
    config: "PretrainedConfig",
    tokenizer: "PreTrainedTokenizerBase",
    name: str,
    revision: str | None = None,
    max_pixels: int | None = None,
) -> Recipe | str:
    """How the model `name` takes pictures, or why it takes none, in a sentence.

    Raises:
        ConfigError: data.image_max_pixels is less than each picture has.
    """
    kind = KINDS.get(config.model_type)
    if kind is None:
        return (
            f"'{asked_name(name)}' ({config.model_type}) learns from text alone; "
            f"models that learn from images: {TRAINED}"
        )
    try:
        processor = class_since(kind.since, kind.processor).from_pretrained(name, revision=revision)
    except Exception as error:  # of a Hub client, or of whatever a file holds
        return f"the image processor of '{name}' cannot be loaded: {first_line(error)[:300]}"
    try:
        recipe = recipe_with(kind, config, processor, max_pixels)
    except Unsuitable as problem:
        return f"'{name}' cannot be used with images: {problem}"
    named = {field: getattr(tokenizer, attribute, None) for field, attribute in kind.names.items()}
    family = replace(recipe.family, **{field: token for field, token in named.items() if token})
    if tokenizer.convert_tokens_to_ids(family.image) != recipe.image_token_id:
        return (
            f"'{name}' cannot be used with images: its config says that token {recipe.image_token_id} stands "
            f"for them, which in its tokenizer is not {family.image}"
        )
    return replace(recipe, family=family)


def recipe_with(kind: Kind, config: "PretrainedConfig", processor: Any, max_pixels: int | None) -> Recipe:
    """How a model with this image processor takes pictures.

    Raises:
        Unsuitable: the processor does something else than the model, or than is known here.
        ConfigError: data.image_max_pixels is less than each picture has.
    """
    settings = json.loads(processor.to_json_string())
    if not all(settings[name] for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")):
        raise Unsuitable("its image processor does not resize, normalize or convert to RGB")
    family = kind.family(config, settings, max_pixels)
    if isinstance(family, Patches):
        settings["size"] = {"shortest_edge": family.fewest, "longest_edge": family.most}
    elif isinstance(family, Tiles):
        settings["size"] = {"longest_edge": family.longest}
    del settings["image_processor_type"]
    return Recipe(family, config.image_token_id, kind.processor, json.dumps(settings, sort_keys=True))
