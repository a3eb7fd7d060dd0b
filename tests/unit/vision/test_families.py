"""Tokens from sizes alone, against what the real processors make of pictures of these sizes."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import transformers
from PIL import Image
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from sft_play.errors import ConfigError
from sft_play.vision.families import Patches, Tiles
from sft_play.vision.recipes import recipe_for
from tests.packages import needs_tiles
from tests.pictures import CONFIGS, odd_sizes, published_recipe

SEED = random.randrange(2**32)


def processor_of(recipe, **changed):
    settings = {**json.loads(recipe.settings), **changed}
    return getattr(transformers, recipe.processor)(**settings)


def qwen(fewest, most):
    recipe = published_recipe(CONFIGS["qwen"])
    settings = {**json.loads(recipe.settings), "size": {"shortest_edge": fewest, "longest_edge": most}}
    family = replace(recipe.family, fewest=fewest, most=most)
    return replace(recipe, family=family, settings=json.dumps(settings))


def tiles(kind, longest, **changed):
    recipe = published_recipe(CONFIGS[kind])
    settings = {**json.loads(recipe.settings), "size": {"longest_edge": longest}, **changed}
    family = replace(recipe.family, longest=longest, cuts=settings["do_image_splitting"])
    return replace(recipe, family=family, settings=json.dumps(settings))


RECIPES = {
    "qwen": lambda: qwen(32**2, 256**2),
    "qwen, large": lambda: qwen(256**2, 1024**2),
    "smolvlm, 4 tiles": lambda: tiles("smolvlm", 256),
    "smolvlm, no multiple of the tile": lambda: tiles("smolvlm", 352),
    "smolvlm, one tile": lambda: tiles("smolvlm", 64),
    "smolvlm, not cut": lambda: tiles("smolvlm", 256, do_image_splitting=False),
    "idefics3": lambda: tiles("idefics3", 256),
    "gemma": lambda: published_recipe(CONFIGS["gemma"]),
}


def made(recipe, height, width):
    """Grid and units that the processor makes of a picture of this size."""
    processor, image = processor_of(recipe), Image.new("RGB", (width, height), (9, 200, 50))
    if isinstance(recipe.family, Patches):
        found = processor(images=[image])
        grid = found["image_grid_thw"][0][1:]
    elif isinstance(recipe.family, Tiles):
        found = processor(images=[[image]], return_row_col_info=True)
        grid = found["rows"][0][0], found["cols"][0][0]
    else:
        found = processor(images=[[image]])
        grid = 1, 1
    pixels = np.asarray(found["pixel_values"])
    return tuple(grid), int(np.prod(pixels.shape[:-3] if pixels.ndim > 2 else pixels.shape[:1]))


def check(name, count, seed):
    print(f"seed {seed}")
    recipe = RECIPES[name]()
    high = 800 if "large" in name else 1500
    for height, width in odd_sizes(count, seed, high):
        fit = recipe.family.fit(height, width)
        assert ((fit.rows, fit.columns), fit.units) == made(recipe, height, width), (height, width)
        assert fit.tokens == sum(recipe.family.runs(fit))
        assert recipe.family.text(fit).count(recipe.family.image) == len(recipe.family.runs(fit))


@pytest.mark.parametrize("name", RECIPES)
def test_sizes_tell_the_grid_and_the_tokens(name):
    check(name, 12, SEED)


@pytest.mark.thorough
@pytest.mark.parametrize("name", RECIPES)
def test_sizes_tell_the_grid_and_the_tokens_of_500_pictures(name):
    check(name, 500, SEED)


def test_tokens_of_patches_are_merged_ones():
    recipe = qwen(32**2, 256**2)
    fit = recipe.family.fit(101, 60)
    assert (fit.height, fit.width) == (104, 64)  # multiples of 4 pixels x 2 patches
    assert (fit.rows, fit.columns, fit.units, fit.tokens) == (26, 16, 416, 104)


@needs_tiles
@pytest.mark.parametrize("size", [(50, 90), (300, 90), (64, 64), (1000, 700)])
def test_the_text_of_tiles_is_that_of_the_processor(size):
    recipe = tiles("smolvlm", 256)
    fit = recipe.family.fit(*size)
    family = recipe.family
    text = family.text(fit).replace(family.image, family.image * family.tokens)
    assert text == get_image_prompt_string(
        fit.rows, fit.columns, family.tokens, family.between, family.image, family.whole
    )


@needs_tiles
def test_a_picture_far_too_long_is_refused_by_patches_alone():
    with pytest.raises(ValueError, match="more than 200 times"):
        qwen(32**2, 256**2).family.fit(1, 201)
    assert tiles("smolvlm", 256).family.fit(1, 201).tokens
    assert published_recipe(CONFIGS["gemma"]).family.fit(1, 201).tokens == 16


@pytest.mark.parametrize("kind", ["qwen", "smolvlm"])
def test_image_max_pixels_bounds_what_a_picture_becomes(kind):
    limit = 300**2
    recipe = published_recipe(CONFIGS[kind], limit)
    for height, width in odd_sizes(15, SEED, 900):
        fit = recipe.family.fit(height, width)
        assert fit.height * fit.width <= limit
        assert made(recipe, height, width)[1] == fit.units


@pytest.mark.parametrize(("kind", "fewest"), [("qwen", 256**2), ("smolvlm", 64**2), ("gemma", 64**2)])
def test_image_max_pixels_below_what_each_picture_has_is_an_error(kind, fewest):
    published_recipe(CONFIGS[kind], fewest)
    with pytest.raises(
        ConfigError, match=rf"image_max_pixels={fewest - 1} is less than the {fewest:,} pixels"
    ):
        published_recipe(CONFIGS[kind], fewest - 1)


def test_models_of_text_alone_have_no_recipe():
    said = recipe_for(transformers.LlamaConfig(), None, "x")
    assert "'x' (llama) learns from text alone" in said
    assert "Qwen3-VL" in said
