"""Pictures drawn on the spot, and what the processors of small models need."""

import io
import math
import random
from pathlib import Path

import numpy as np
from PIL import Image
from transformers import Gemma3Config, Idefics3Config, Qwen3VLConfig, SmolVLMConfig

CONFIGS = {
    "qwen": Qwen3VLConfig(vision_config=dict(patch_size=4, spatial_merge_size=2, temporal_patch_size=2)),
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
