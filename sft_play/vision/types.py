"""The pictures of a row, from reading to the loader, and their column in prepared rows."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import pyarrow as pa

FOLDER = "pictures"  # of prepared rows: what has no file of its own


@dataclass(frozen=True)
class Fit:
    """How a picture of some size is given to a model."""

    height: int  # in pixels, after it was resized; of a picture that is cut into tiles, before that
    width: int
    rows: int  # of the grid: of patches (Qwen, before they are merged), or of tiles (0 x 0: it is not cut)
    columns: int
    units: int  # that the tower sees: patches, or tiles with the one of the whole picture
    tokens: int  # of the row, which its features replace
    begin: int = 0  # the first of them in its row, where memory depends on that (Gemma 3)


@dataclass(frozen=True)
class Picture:
    """One picture of a row; it is decoded when it is used."""

    path: str  # of the file of its bytes, where the data has it, or within the folder of the prepared rows
    size: int  # of that file, in bytes
    height: int  # in pixels, as it is shown: rotated as the file says
    width: int
    fit: Fit


FIT = pa.struct([(field.name, pa.int32()) for field in fields(Fit)])
PICTURE = pa.struct(
    [("path", pa.string()), ("size", pa.int64()), ("height", pa.int32()), ("width", pa.int32()), ("fit", FIT)]
)
PICTURES = pa.list_(PICTURE)


def pictures_of(cell: Iterable[Mapping[str, Any]]) -> list[Picture]:
    """The pictures of a row, from its cell in the column `pictures` or from a prepared conversation."""
    return [Picture(**{**one, "fit": Fit(**one["fit"])}) for one in cell]


def picture_lists(rows: Iterable[Iterable[Picture]]) -> pa.Array:
    """The column `pictures` of rows."""
    return pa.array([list(map(asdict, row)) for row in rows], PICTURES)
