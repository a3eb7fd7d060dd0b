"""Pictures that are not here count as many tokens as those that are prepared."""

import json
import random

import numpy as np
import pytest
from transformers import LlamaConfig

from sft_play.errors import ConfigError
from sft_play.vision.described import described_picture, pictures_asked, processor_settings
from sft_play.vision.expansion import repeated
from sft_play.vision.looks import look_of
from sft_play.vision.types import Picture
from tests.packages import needs_tiles
from tests.pictures import CONFIGS, config_of, odd_sizes, recipe_of, save_folder, tokenizer_of

SEED = random.randrange(2**32)


@pytest.mark.parametrize("kind", sorted(CONFIGS.keys() - {"gemma"}))
def test_a_described_picture_has_the_tokens_of_one_in_a_row(kind, tmp_path):
    print(f"seed {SEED}")
    tokenizer, settings = tokenizer_of(kind), processor_settings(str(save_folder(kind, tmp_path)))
    config, recipe = config_of(kind, tokenizer), recipe_of(kind, tokenizer)
    for height, width in odd_sizes(60, SEED):
        found = described_picture(config, settings, None, height, width)
        fit = recipe.family.fit(height, width)
        assert found.fit == fit and found.look == look_of(config)
        text = recipe.family.bare_text(fit)
        ids = np.array(tokenizer(f"a{text}b", add_special_tokens=False)["input_ids"])
        whole, _, _ = repeated(recipe, ids, ids, [Picture("p", 1, height, width, fit)])
        plain = tokenizer("ab", add_special_tokens=False)["input_ids"]
        assert found.row_tokens == len(whole) - len(plain), (height, width, text)


@needs_tiles
def test_a_model_of_the_hub_is_taken_to_have_the_processor_that_its_kind_is_published_with(tmp_path):
    assert processor_settings("Qwen/Qwen3-VL-8B-Instruct") == ""
    kept = json.loads(processor_settings(str(save_folder("smolvlm", tmp_path))))
    config = config_of("smolvlm", tokenizer_of("smolvlm"))
    assert kept["size"] == {"longest_edge": 256}
    published = described_picture(config, "", None, 700, 900)
    assert published == described_picture(config, json.dumps(kept), None, 700, 900)
    larger = json.dumps(kept | {"size": {"longest_edge": 512}})
    assert described_picture(config, larger, None, 700, 900).fit.units > published.fit.units


@pytest.mark.parametrize(
    ("kind", "size", "max_pixels", "said"),
    [
        ("qwen", (1, 900), None, "pictures of 900 x 1 pixels: one side is more than 200 times the other"),
        ("qwen", (99, 99), 5, "data.image_max_pixels=5 is less"),
    ],
)
def test_pictures_that_a_model_does_not_take_are_refused(kind, size, max_pixels, said):
    with pytest.raises(ConfigError, match=said):
        described_picture(config_of(kind, tokenizer_of(kind)), "", max_pixels, *size)


def test_a_model_of_text_alone_is_refused():
    with pytest.raises(ConfigError, match="Gemma 3, SmolVLM2 and Idefics3, and this is llama"):
        described_picture(LlamaConfig(), "", None, 9, 9)


def test_a_size_has_the_width_first():
    assert {pictures_asked(2, text) for text in (" 1024x768", "1024 X 768", "1024*768")} == {
        (2, ((768, 1024),))
    }
