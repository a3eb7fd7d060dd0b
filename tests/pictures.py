"""Pictures drawn on the spot, and what the processors of small models need."""

import io
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma3Config,
    Idefics3Config,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3VLConfig,
    SmolVLMConfig,
)
from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

from sft_play.vision.described import published_settings
from sft_play.vision.recipes import KINDS, recipe_with

PATCHES = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
CONFIGS = {
    "qwen": Qwen3VLConfig(vision_config=PATCHES),
    "qwen35": Qwen3_5Config(vision_config=PATCHES),
    "smolvlm": SmolVLMConfig(vision_config=dict(image_size=64, patch_size=8), scale_factor=2),
    "idefics3": Idefics3Config(vision_config=dict(image_size=64, patch_size=8), scale_factor=2),
    "gemma": Gemma3Config(vision_config=dict(image_size=64, patch_size=8), mm_tokens_per_image=16),
}


def drawn(height: int, width: int, seed: int = 0) -> Image.Image:
    """A smooth picture of random colours, the same for the same seed."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def save(path: Path, height: int, width: int, seed: int = 0, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn(height, width, seed).save(path, **options)
    return path


def odd_sizes(count: int, seed: int, high: int = 1500) -> list[tuple[int, int]]:
    """Heights and widths of all shapes, small ones as often as large ones."""
    rng = random.Random(seed)
    found: list[tuple[int, int]] = []
    while len(found) < count:
        height, width = (int(math.exp(rng.uniform(0, math.log(high)))) for _ in range(2))
        if max(height, width) <= 200 * min(height, width):
            found.append((height, width))
    return found


# As the models have them, without tools and thinking.
QWEN = """{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}{%- for part in message.content %}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif 'text' in part %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}
{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
GEMMA = """{{ bos_token }}
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}{%- set role = 'model' -%}{%- else -%}{%- set role = message['role'] -%}{%- endif -%}
{{ '<start_of_turn>' + role + '\\n' }}
{%- if message['content'] is string -%}{{ message['content'] | trim }}
{%- else -%}{%- for item in message['content'] -%}
{%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}
{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}{%- endif -%}
{{ '<end_of_turn>\\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""
TILES = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<|im_start|>"]
TILES += [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
GEMMAS = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
QWENS = ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|im_start|>", "<|im_end|>"]
WORDS = {
    "qwen": (QWEN, QWENS, {}),
    "qwen35": (QWEN, QWENS, {}),
    "smolvlm": (DEFAULT_CHAT_TEMPLATE, TILES, {}),
    "idefics3": (DEFAULT_CHAT_TEMPLATE, TILES, {}),
    "gemma": (GEMMA, [*GEMMAS.values(), "<start_of_turn>", "<end_of_turn>"], GEMMAS),
}
TEXTS = ["What is it?\n\nIt is a cat.\n", "\n\n\n", "user\n\nmodel\n"]


def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """A small tokenizer of bytes with the tokens and the chat template of such models; "\n\n" is a token."""
    template, special, named = WORDS[kind]
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<eos>", "<pad>", "<bos>", *special],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    raw.train_from_iterator(TEXTS * 3, trainer)
    tokens = dict(eos_token="<eos>", pad_token="<pad>", bos_token="<bos>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, extra_special_tokens=named, **tokens)
    tokenizer.chat_template = template
    return tokenizer


def published_recipe(config, max_pixels: int | None = None):
    """How such a model takes pictures, with the image processor that it is published with."""
    kind = KINDS[config.model_type]
    processor = getattr(transformers, kind.processor)(**published_settings(config))
    return recipe_with(kind, config, processor, max_pixels)


def recipe_of(kind: str, tokenizer: PreTrainedTokenizerFast | None = None, max_pixels: int | None = None):
    """How such a model takes pictures, with the tokens of its small tokenizer; Qwen's as small as they are."""
    config = config_of(kind, tokenizer or tokenizer_of(kind))
    if not kind.startswith("qwen"):
        return published_recipe(config, max_pixels)
    recipe = published_recipe(config)
    size = {"shortest_edge": 32**2, "longest_edge": max_pixels or 512**2}
    family = replace(recipe.family, fewest=size["shortest_edge"], most=size["longest_edge"])
    settings = json.dumps({**json.loads(recipe.settings), "size": size}, sort_keys=True)
    return replace(recipe, family=family, settings=settings)


def config_of(kind: str, tokenizer: PreTrainedTokenizerFast):
    """The small config, whose image token is that of the tokenizer."""
    token = {"qwen": "<|image_pad|>", "qwen35": "<|image_pad|>", "gemma": "<image_soft_token>"}.get(
        kind, "<image>"
    )
    config = type(CONFIGS[kind]).from_dict(CONFIGS[kind].to_dict())
    config.image_token_id = tokenizer.convert_tokens_to_ids(token)
    return config


def save_folder(kind: str, folder: Path) -> Path:
    """A model's folder without weights: config, tokenizer and the settings of its image processor."""
    tokenizer = tokenizer_of(kind)
    config = config_of(kind, tokenizer)
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    recipe = recipe_of(kind, tokenizer)
    names = {"image_processor_type": recipe.processor.removesuffix("Pil"), **json.loads(recipe.settings)}
    (folder / "preprocessor_config.json").write_text(json.dumps(names))
    return folder
