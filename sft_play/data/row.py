"""A raw row, and where it is from."""

from dataclasses import dataclass
from typing import Any

from sft_play.errors import DataError


@dataclass(frozen=True)
class Row:
    """One raw row; `line` is 1-based (for Parquet files and Hub datasets it is the row number).

    A row of a text file may be a section of a document: `begins` and `ends` say whether it is the first and
    the last.
    """

    data: dict[str, Any]
    file: str
    line: int
    begins: bool = True
    ends: bool = True

    @property
    def where(self) -> str:
        """`file:line`, which editors can jump to."""
        return f"{self.file}:{self.line}"


def utf8(raw: bytes, where: str, offset: int) -> str:
    """The text of bytes that start at `offset` of a file.

    Raises:
        DataError: they are not UTF-8; names the first wrong byte.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: byte {raw[error.start]:#04x} at offset {offset + error.start} is not UTF-8"
        ) from None
