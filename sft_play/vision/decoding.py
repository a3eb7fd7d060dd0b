"""The bytes of a picture -> its size, without decoding, and its pixels as a model takes them."""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from PIL.ExifTags import Base

from sft_play.errors import DataError, first_line
from sft_play.files import read_whole
from sft_play.spelling import make
from sft_play.vision.families import Recipe
from sft_play.vision.types import Picture

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # not those that start other programs
MAX_BYTES = 64 << 20
MAX_PIXELS = 1 << 26
TRANSPOSED = (5, 6, 7, 8)  # orientations of EXIF in which height and width are exchanged


def size_of(content: bytes) -> tuple[int, int]:
    """Height and width of a picture as it is shown, in pixels; ValueError, a sentence, if it is refused."""
    with _opened(content) as image:
        frames = getattr(image, "n_frames", 1)
        if frames > 1 and image.format != "MPO":  # of cameras: a picture, with further ones behind it
            raise ValueError(f"it has {frames} frames or pages; keep one of them in a file of its own")
        if image.mode in ("I", "F") or image.mode.startswith("I;"):
            raise ValueError("it has more than 8 bits a channel; convert it to 8 bits")
        width, height = image.size
        whole_exif = image.format != "PNG" or b"eXIf" in content  # of a PNG it may follow the pixels
        exif = image.getexif() if whole_exif else Image.Image.getexif(image)
        if not _seems_whole(image, content):
            image.load()
    return (width, height) if exif.get(Base.Orientation) in TRANSPOSED else (height, width)


@contextmanager
def _opened(content: bytes) -> Iterator[Image.Image]:
    """The picture, not decoded; ValueError, a sentence, for whatever is wrong with it in the block."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(BytesIO(content), formats=FORMATS)
        if image.width * image.height > MAX_PIXELS:
            raise Image.DecompressionBombError
        yield image
    except Image.DecompressionBombError:
        raise ValueError(f"it has more than {MAX_PIXELS:,} pixels, as decompression bombs have") from None
    except Image.UnidentifiedImageError:
        raise ValueError(f"it is no picture that can be read ({', '.join(FORMATS)})") from None
    except (OSError, SyntaxError) as error:  # what Pillow raises for files that are cut or damaged
        raise ValueError(f"it is damaged: {first_line(error)}") from None


def _seems_whole(image: Image.Image, content: bytes) -> bool:
    """Whether a file ends as its format says, as far as can be told without decoding it."""
    if image.format == "PNG":
        Image.open(BytesIO(content), formats=FORMATS).verify()
        return True
    if image.format == "WEBP":  # its first chunk says how long all are
        return 8 + int.from_bytes(content[4:8], "little") <= len(content)
    return image.format in ("JPEG", "MPO") and content.endswith(b"\xff\xd9")


def decoded(content: bytes) -> Image.Image:
    """The picture in RGB, as it is shown; ValueError, a sentence, if it is damaged."""
    with _opened(content) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def pixels(picture: Picture, recipe: Recipe, folder: Path) -> np.ndarray:
    """What the tower takes, float32 [units, ...], of a picture of rows prepared in `folder`.

    Raises:
        DataError: the file is gone, or is not what it was when the rows were prepared.
    """
    path = folder / picture.path
    try:
        content = read_whole(path, MAX_BYTES)
        image = decoded(content)
        if (len(content), image.height, image.width) != (picture.size, picture.height, picture.width):
            raise ValueError("it has changed since the rows were prepared")
    except (OSError, ValueError) as error:
        again = f"put it back, or prepare the rows again: `{make('clean-cache')}`, then `{make('prepare')}`"
        raise DataError(f"{path} cannot be used: {first_line(error)}; {again}") from None
    made = _processor(recipe.processor, recipe.settings)(images=[[image]])["pixel_values"]
    found = np.asarray(made, np.float32)  # [patches, numbers], or with tiles or squares last
    return found.reshape(picture.fit.units, *found.shape[-3 if found.ndim > 2 else -1 :])


@cache
def _processor(name: str, settings: str) -> Any:
    import transformers

    return getattr(transformers, name)(**json.loads(settings))
