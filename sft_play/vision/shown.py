"""The pictures of rows, for a person."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path, PurePath
from typing import Any

from sft_play.files import read_whole
from sft_play.rows.images import data_url
from sft_play.vision.decoding import MAX_BYTES, decoded
from sft_play.vision.families import Recipe
from sft_play.vision.types import Picture, pictures_of

THUMBNAIL_PIXELS, THUMBNAIL_QUALITY = 128, 80  # of the longer side; of JPEG


def picture_lines(cell: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line for each picture of a row: its size, and what becomes of it."""
    return [
        f"  image {number}: {one.width} x {one.height} pixels, resized to {one.fit.width} x "
        f"{one.fit.height}: {one.fit.tokens} tokens ({PurePath(one.path).name})"
        for number, one in enumerate(pictures_of(cell), 1)
    ]


def thumbnail(picture: Picture) -> str:
    """A small copy of a picture as a data: URL, a few KB; OSError or ValueError if it cannot be read."""
    image, file = decoded(read_whole(Path(picture.path), MAX_BYTES)), BytesIO()
    image.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
    image.save(file, "JPEG", quality=THUMBNAIL_QUALITY)
    return data_url(file.getvalue(), "image/jpeg")


def thumbnails(pictures: Sequence[Picture]) -> dict[str, list[str]]:
    """Small copies of pictures under "images"; {} without any, or if they are gone."""
    with suppress(OSError, ValueError):
        return {"images": list(map(thumbnail, pictures))} if pictures else {}
    return {}


def each_once(recipe: Recipe | str, ids: Sequence[int], labels: Sequence[int]) -> list[list[int]]:
    """Ids and labels of a row with one token in place of image tokens that follow each other."""
    repeated = None if isinstance(recipe, str) else recipe.image_token_id
    kept = [at for at, token in enumerate(ids) if token != repeated or at == 0 or ids[at - 1] != token]
    return [[row[at] for at in kept] for row in (ids, labels)]
