"""How families of models take pictures: from sizes to tokens, without decoding, and the text for each.

The sizes are those of the image processors of transformers, whose own counts are wrong where the longest edge
of SmolVLM is no multiple of its tiles, where a picture is one tile, and where a size is given at the call.
"""

import math
from dataclasses import dataclass

from sft_play.vision.types import Fit

MAX_SIDE = 4096  # of the processors of SmolVLM and Idefics3, whatever their settings say
MAX_ASPECT = 200  # of those of Qwen
TEXT_ALONE = "this model learns from text alone"


class Family:
    """What a picture becomes in a row of text, unless a family says otherwise."""

    image: str  # the token that stands for features
    attends_both_ways = False  # tokens of a picture see those of it that follow

    @property
    def placeholder(self) -> str:
        """What a chat template writes for a picture."""
        return self.image

    def text(self, fit: Fit) -> str:
        """What replaces the placeholder; each image token in it stands for one of `runs`."""
        return self.image

    def bare_text(self, fit: Fit) -> str:
        """What replaces a picture where a template writes nothing for it."""
        return self.text(fit)

    def runs(self, fit: Fit) -> list[int]:
        """Image tokens of each run."""
        return [fit.tokens]


@dataclass(frozen=True)
class Patches(Family):
    """Qwen3-VL, Qwen3.5: a picture keeps its shape and becomes a grid of patches, merged to tokens."""

    side: int  # of a patch, in pixels
    merged: int  # patches along each side of a token
    frames: int  # that a patch has; those of a picture are the same
    fewest: int  # pixels of a picture
    most: int
    image: str = "<|image_pad|>"
    begin: str = "<|vision_start|>"
    end: str = "<|vision_end|>"

    def fit(self, height: int, width: int) -> Fit:
        """From the size of a picture, in pixels; ValueError, a sentence, if the model refuses it."""
        if max(height, width) > MAX_ASPECT * min(height, width):
            raise ValueError(f"one side is more than {MAX_ASPECT} times the other, which the model refuses")
        factor = self.side * self.merged
        tall, wide = (round(length / factor) * factor for length in (height, width))
        if tall * wide > self.most:
            shrink = math.sqrt(height * width / self.most)
            tall, wide = (
                max(factor, math.floor(length / shrink / factor) * factor) for length in (height, width)
            )
        elif tall * wide < self.fewest:
            grow = math.sqrt(self.fewest / (height * width))
            tall, wide = (math.ceil(length * grow / factor) * factor for length in (height, width))
        rows, columns = tall // self.side, wide // self.side
        return Fit(tall, wide, rows, columns, rows * columns, rows * columns // self.merged**2)

    def bare_text(self, fit: Fit) -> str:
        """What replaces a picture where a template writes nothing for it."""
        return f"{self.begin}{self.image}{self.end}"


@dataclass(frozen=True)
class Tiles(Family):
    """SmolVLM, Idefics3: a picture is resized to whole tiles and cut into them, with one of the whole."""

    side: int  # of a tile, in pixels
    tokens: int  # of a tile
    longest: int  # edge of a picture, to which smaller ones grow too
    cuts: bool = True
    image: str = "<image>"
    between: str = "<fake_token_around_image>"
    whole: str = "<global-img>"

    def fit(self, height: int, width: int) -> Fit:
        """From the size of a picture, in pixels.

        The processor resizes twice, and rounds the shorter side by the ratio that the first time left.
        """
        tall, wide = _with_longest_edge(height, width, self.longest)
        if not self.cuts:
            return Fit(self.side, self.side, 0, 0, 1, self.tokens)
        ratio = wide / tall
        if wide >= tall:
            wide = self._whole_tiles(wide)
            tall = self._whole_tiles(int(wide / ratio))
        else:
            tall = self._whole_tiles(tall)
            wide = self._whole_tiles(int(tall * ratio))
        rows, columns = tall // self.side, wide // self.side
        if max(rows, columns) <= 1:
            return Fit(tall, wide, 0, 0, 1, self.tokens)
        units = rows * columns + 1
        return Fit(tall, wide, rows, columns, units, units * self.tokens)

    def _whole_tiles(self, length: int) -> int:
        return math.ceil(length / self.side) * self.side

    def text(self, fit: Fit) -> str:
        """What replaces the placeholder; each image token in it stands for one of `runs`."""
        lines = [self._row(row, fit.columns) for row in _from_one(fit.rows)]
        gap = "\n" if lines else ""
        return "".join([*lines, gap, f"{self.between}{self.whole}{self.image}{self.between}"])

    def _row(self, row: int, columns: int) -> str:
        """What stands for a row of tiles."""
        tiles = (f"{self.between}<row_{row}_col_{column}>{self.image}" for column in _from_one(columns))
        return "".join(tiles) + "\n"

    def runs(self, fit: Fit) -> list[int]:
        """Image tokens of each run."""
        return [self.tokens] * fit.units


@dataclass(frozen=True)
class OneSize(Family):
    """Gemma 3: each picture is resized to the same square."""

    attends_both_ways = True
    side: int  # in pixels
    tokens: int
    image: str = "<image_soft_token>"
    begin: str = "<start_of_image>"
    end: str = "<end_of_image>"

    @property
    def placeholder(self) -> str:
        """What a chat template writes for a picture."""
        return self.begin

    def fit(self, height: int, width: int) -> Fit:
        """The same for every size."""
        return Fit(self.side, self.side, 1, 1, 1, self.tokens)

    def text(self, fit: Fit) -> str:
        """What replaces the placeholder; each image token in it stands for one of `runs`."""
        return f"\n\n{self.begin}{self.image}{self.end}\n\n"


@dataclass(frozen=True)
class Recipe:
    """How one model takes pictures."""

    family: Patches | Tiles | OneSize
    image_token_id: int
    processor: str  # the class of transformers that resizes and normalizes with Pillow
    settings: str  # of the processor, as JSON, with data.image_max_pixels


def _with_longest_edge(height: int, width: int, longest: int) -> tuple[int, int]:
    """A size whose longer side is `longest`, at most MAX_SIDE, rounded as the processor does."""
    if width >= height:
        height, width = int(longest / (width / height)), longest
        height += height % 2
    else:
        height, width = longest, int(longest * (width / height))
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    if max(height, width) <= MAX_SIDE:
        return height, width
    ratio = width / height
    if width >= height:
        return max(int(MAX_SIDE / ratio), 1), MAX_SIDE
    return MAX_SIDE, max(int(MAX_SIDE * ratio), 1)


def _from_one(count: int) -> range:
    return range(1, count + 1)
