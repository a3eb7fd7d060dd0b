"""Tiny vision-language checkpoints of real architectures with random weights, made on the spot."""

import random
import shutil
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset, Features
from transformers import AutoConfig, AutoModelForImageTextToText, PretrainedConfig

from sft_play.data.store import ROWS
from sft_play.vision.looks import Look
from sft_play.vision.types import PICTURES, Fit, Picture
from tests import pictures
from tests.conftest import VOCABULARY

MODEL_TYPES = {
    "smolvlm": "smolvlm",
    "qwen": "qwen3_vl",
    "qwen35": "qwen3_5",
    "gemma": "gemma3",
}  # by the names of tests/pictures.py
IMAGE, VIDEO, START, END = VOCABULARY - 4, VOCABULARY - 3, VOCABULARY - 2, VOCABULARY - 1
TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY, "max_position_embeddings": 4096,
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
QWEN_VISION = {
    "depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 64, "num_position_embeddings": 64,
}  # fmt: skip
SIGLIP = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2,
    "image_size": 32, "patch_size": 4,
}  # fmt: skip
QWEN_TOKENS = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END,
}  # fmt: skip
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
TREES: dict[str, dict[str, Any]] = {
    "qwen3_vl": {
        "text_config": TEXT | {"rope_parameters": MROPE},
        "vision_config": QWEN_VISION | {"deepstack_visual_indexes": [0, 1]},
        **QWEN_TOKENS,
    },
    "qwen3_5": {
        "text_config": TEXT | LINEAR | {"rope_parameters": MROPE | {"partial_rotary_factor": 1.0}},
        "vision_config": QWEN_VISION,
        **QWEN_TOKENS,
    },
    "gemma3": {
        "text_config": TEXT | {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2},
        "vision_config": SIGLIP | {"vision_use_head": False},
        "mm_tokens_per_image": 16, "image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END,
    },
    "smolvlm": {
        "text_config": {key: value for key, value in TEXT.items() if key != "head_dim"} | {"model_type": "llama"},
        "vision_config": SIGLIP, "scale_factor": 2, "image_token_id": IMAGE, "pad_token_id": 0,
    },
    "mllama": {
        "text_config": {key: value for key, value in TEXT.items() if key not in ("head_dim", "bos_token_id")} | {"cross_attention_layers": [1]},
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_global_layers": 1,
            "attention_heads": 2, "image_size": 32, "patch_size": 4, "vision_output_dim": 64,
            "intermediate_layers_indices": [0], "max_num_tiles": 2, "supported_aspect_ratios": [[1, 1], [1, 2]],
        },
        "image_token_index": IMAGE,
    },
}  # fmt: skip


def config_of(kind: str, **changes: Any) -> PretrainedConfig:
    """The config of a kind, `model_type`, with other values at its top."""
    return AutoConfig.for_model(kind, **TREES[kind] | changes)


def random_model(config: PretrainedConfig, **settings: Any) -> Any:
    """A model with random weights, large enough that images matter, and settings of `from_config`."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, **settings)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    return model


def checkpoint(kind: str, folder: Path, tokenizer: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Saves a model with random weights and the tokenizer of a folder."""
    random_model(config_of(kind), dtype=dtype).save_pretrained(folder)
    for path in tokenizer.glob("*token*"):
        shutil.copy(path, folder / path.name)
    for path in tokenizer.glob("chat_template*"):
        shutil.copy(path, folder / path.name)
    return folder


def model_folder(kind: str, folder: Path) -> Path:
    """A small model that sees, with random weights, its tokenizer and the settings of its image processor."""
    pictures.save_folder(kind, folder)
    tokenizer, tree = pictures.tokenizer_of(kind), dict(TREES[MODEL_TYPES[kind]])
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    text = tree["text_config"] | special | {"vocab_size": len(tokenizer)}
    tree |= {"text_config": text, "image_token_id": pictures.config_of(kind, tokenizer).image_token_id}
    if kind == "gemma":
        tree["image_token_index"] = tree.pop("image_token_id")
        tree["tie_word_embeddings"] = False  # with random weights, it would only repeat the last token
    if kind.startswith("qwen"):
        ends = {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
        tree |= {name: tokenizer.convert_tokens_to_ids(token) for name, token in ends.items()}
        tree["video_token_id"] = tokenizer.bos_token_id
    else:
        tree["vision_config"] = tree["vision_config"] | {"image_size": 64, "patch_size": 8}
        tree["pad_token_id"] = tokenizer.pad_token_id
    random_model(AutoConfig.for_model(MODEL_TYPES[kind], **tree)).save_pretrained(folder)
    return folder


def picture(kind: str, rng: random.Random, path: str) -> dict[str, Any]:
    """A picture of a row, as the column `pictures` has it, of a size that no file needs to have."""
    if kind in ("qwen3_vl", "qwen3_5"):
        rows, columns = 2 * rng.randrange(1, 6), 2 * rng.randrange(1, 6)
        fit = Fit(4 * rows, 4 * columns, rows, columns, rows * columns, rows * columns // 4)
    else:
        tiles = 1 if kind == "gemma3" else rng.randint(1, 3)
        fit = Fit(32, 32 * tiles, int(tiles > 1), tiles - (tiles == 1), tiles, 16 * tiles)
    return {"path": path, "size": 0, "height": fit.height, "width": fit.width, "fit": asdict(fit)}


def picture_rows(kind: str, count: int, seed: int, images: Sequence[int] | None = None) -> Dataset:
    """Random tokenized rows with 0 to 3 pictures each, or as many as said, anywhere before the answer."""
    rng, rows = random.Random(seed), []
    for number in range(count):
        ids = [rng.randrange(3, IMAGE) for _ in range(rng.randrange(1, 6))]
        pictures = []
        for _ in range(rng.randint(0, 3) if images is None else images[number]):
            one = picture(kind, rng, f"{seed} {number} {len(pictures)}")
            one["fit"]["begin"] = (len(ids) + 1) * (kind == "gemma3")
            pictures.append(one)
            seen = [IMAGE] * one["fit"]["tokens"]
            ids += [START, *seen, END] if kind != "smolvlm" else [*seen, rng.randrange(3, IMAGE)]
        answer = [rng.randrange(3, IMAGE) for _ in range(rng.randrange(2, 12))]
        labels = [-100] * len(ids) + answer
        rows.append(
            {"input_ids": ids + answer, "labels": labels, "length": len(labels), "pictures": pictures}
        )
    return Dataset.from_list(
        rows, features=Features.from_arrow_schema(ROWS.append(pa.field("pictures", PICTURES)))
    )


def random_pixels(look: Look) -> Callable[[Picture], np.ndarray]:
    """Decodes a picture to numbers that follow from its path."""

    def pixels_of(one: Picture) -> np.ndarray:
        generator = torch.Generator().manual_seed(zlib.crc32(one.path.encode()))
        return torch.randn(one.fit.units, *look.unit_shape, generator=generator).numpy()

    return pixels_of
