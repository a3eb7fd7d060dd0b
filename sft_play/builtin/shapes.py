"""Drawn shapes in colours, and questions about them: rows with images that a small model learns on a CPU."""

import json
import random
from collections.abc import Mapping
from pathlib import Path

from PIL import Image, ImageDraw

from sft_play.vision.types import FOLDER

SIDE = 64  # of a picture, in pixels
COLOURS = {
    "blue": (50, 80, 220),
    "green": (40, 170, 70),
    "orange": (240, 140, 30),
    "purple": (150, 60, 190),
    "red": (220, 40, 40),
    "yellow": (240, 210, 50),
}
CORNERS = {  # of shapes from -1 to 1, the circle has none
    "circle": (),
    "diamond": ((0, -1), (1, 0), (0, 1), (-1, 0)),
    "square": ((-1, -1), (1, -1), (1, 1), (-1, 1)),
    "triangle": ((0, -1), (1, 1), (-1, 1)),
}
GREYS = (0, 20, 40, 215, 235, 255)  # of backgrounds
QUESTION = "Which shape and colour?"


def drawn(rng: random.Random, colour: str, shape: str) -> Image.Image:
    """A picture of one shape, not quite in its middle, on a grey background."""
    image = Image.new("RGB", (SIDE, SIDE), (rng.choice(GREYS),) * 3)
    radius = rng.uniform(0.3, 0.42) * SIDE
    room = min(SIDE / 2 - radius - 1, 0.1 * SIDE)
    x, y = (SIDE / 2 + rng.uniform(-room, room) for _ in range(2))
    draw = ImageDraw.Draw(image)
    if corners := CORNERS[shape]:
        draw.polygon([(x + radius * right, y + radius * down) for right, down in corners], COLOURS[colour])
    else:
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), COLOURS[colour])
    return image


def write_rows(folder: Path, counts: Mapping[str, int], seed: int) -> None:
    """Writes a JSONL file for each split, of so many rows, and their pictures."""
    rng = random.Random(f"shapes/{seed}")
    (folder / FOLDER).mkdir()
    digits = len(str(max(counts.values())))
    for split, count in counts.items():
        lines = ""
        for number in range(count):
            colour, shape = rng.choice(list(COLOURS)), rng.choice(list(CORNERS))
            name = f"{FOLDER}/{split}-{number:0{digits}}.png"
            drawn(rng, colour, shape).save(folder / name)
            turns = [("user", f"<image>{QUESTION}"), ("assistant", f"{colour} {shape}")]
            messages = [{"role": role, "content": text} for role, text in turns]
            lines += json.dumps({"messages": messages, "images": [name]}) + "\n"
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")


def texts() -> list[str]:
    """What a tokenizer for these rows learns from."""
    return [QUESTION, *(f"{colour} {shape}" for colour in COLOURS for shape in CORNERS)]
