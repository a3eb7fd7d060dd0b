"""Raw rows, and JSON files -> raw rows: one object a line (streamed), or an array (loaded as one string)."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sft_play.errors import DataError, kind_of
from sft_play.rows.strict_json import decoder, require_shallow

UTF8_BOM = b"\xef\xbb\xbf"
AS_NULL = "values, read as null"  # ends what is noted of them
WHITESPACE = re.compile(r"\s*")
ARRAY_START = re.compile(r'\s*(?:\{\s*"data"\s*:\s*)?\[')


@dataclass(frozen=True)
class Row:
    """One raw row; `line` is 1-based (for Parquet files and Hub datasets it is the row number).

    A row of a text file may be a section of a document: `begins` and `ends` say whether it is the first and
    the last. One that cannot be read has no data, and `problem` says why.
    """

    data: dict[str, Any]
    file: str
    line: int
    begins: bool = True
    ends: bool = True
    problem: str = ""

    @property
    def where(self) -> str:
        """`file:line`, which editors can jump to."""
        return f"{self.file}:{self.line}"

    def require_read(self) -> None:
        """Raises a DataError if the row could not be read."""
        if self.problem:
            raise DataError(self.problem)


@contextmanager
def decoding(file: Path) -> Iterator[None]:
    """Raises a DataError, with line and byte, if a file that is read in the block is not UTF-8."""
    try:
        yield
    except UnicodeDecodeError:
        offset = 0
        with file.open("rb") as lines:
            for number, raw in enumerate(lines, 1):
                utf8(raw, f"{file}:{number}", offset)
                offset += len(raw)
        raise


def utf8(raw: bytes, where: str, offset: int) -> str:
    """The text of bytes at an offset of a file; raises a DataError that names the first that is not UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: byte {raw[error.start]:#04x} at offset {offset + error.start} is not UTF-8; save the "
            "file as UTF-8"
        ) from None


def as_null(name: str, notes: Counter[str]) -> None:
    """Counts a value that is no number, such as NaN, which is read as null: pandas writes missing ones so."""
    notes[f"{name} {AS_NULL}"] += 1


def _decoder(notes: Counter[str]) -> json.JSONDecoder:
    return decoder(lambda name: as_null(name, notes))


def _object(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise DataError(_no_object(value, where))
    return value


def _no_object(value: object, where: str) -> str:
    return f"{where}: expected a JSON object, found {'null' if value is None else kind_of(value)}"


def _of_value(value: object, file: str, line: int) -> Row:
    row = Row({}, file, line)
    if isinstance(value, dict):
        return replace(row, data=value)
    return replace(row, problem=_no_object(value, row.where))


def read_jsonl(file: Path, notes: Counter[str]) -> Iterator[Row]:
    """An object a line; reads one line at a time. A line that is none is a row that could not be read."""
    strict, offset = _decoder(notes), 0
    with file.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            line = raw.removeprefix(UTF8_BOM) if number == 1 else raw
            text = line.strip()
            if number == 1 and text.startswith(b"["):  # an array in a .jsonl file
                yield from _read_json_whole(file, notes)
                return
            if text:
                yield _line(strict, line, Row({}, str(file), number), offset + len(raw) - len(line))
            else:
                notes["blank lines"] += 1
            offset += len(raw)


def _line(strict: json.JSONDecoder, line: bytes, row: Row, offset: int) -> Row:
    """The row of a line at an offset of its file."""
    try:
        text = utf8(line, row.where, offset).strip()
        return replace(row, data=_object(require_shallow(strict.decode(text), text), row.where))
    except json.JSONDecodeError as error:
        cut = "" if line.endswith(b"\n") else " The line has no final newline: is the file truncated?"
        said = error.msg.removesuffix(" at")
        problem = f"{row.where}: not valid JSON: {said} at character {error.pos + 1}.{cut}"
    except DataError as error:
        problem = str(error)
    except (ValueError, RecursionError) as error:
        problem = f"{row.where}: {error}"
    return replace(row, problem=problem)


def read_json(file: Path, notes: Counter[str]) -> Iterator[Row]:
    """A .json file is an array, {"data": [...]}, or (as is common) JSON lines with the wrong extension."""
    with file.open("rb") as lines:
        first = next((line for line in lines if line.removeprefix(UTF8_BOM).strip()), b"")
    try:
        value = json.loads(first.removeprefix(UTF8_BOM))  # what is wrong in it is said when it is read
    except (ValueError, RecursionError):
        value = None
    is_lines = isinstance(value, dict) and not isinstance(value.get("data"), list)
    yield from read_jsonl(file, notes) if is_lines else _read_json_whole(file, notes)


def _read_json_whole(file: Path, notes: Counter[str]) -> Iterator[Row]:
    with decoding(file):
        text = file.read_bytes().decode("utf-8-sig")
    start = ARRAY_START.match(text)
    if start:
        yield from _array_rows(text, start.end(), file, _decoder(notes))
        return
    with _json_errors(file, str(file)):
        value = _object(require_shallow(_decoder(notes).decode(text), text), f"{file}:1")
    wrapped = value.get("data")
    for number, row in enumerate(wrapped if isinstance(wrapped, list) else [value], 1):
        yield _of_value(row, str(file), number)


@contextmanager
def _json_errors(file: Path, place: str) -> Iterator[None]:
    """Errors of JSON with the line that they name, other errors of a value with its `place`."""
    try:
        yield
    except json.JSONDecodeError as error:
        raise DataError(
            f"{file}:{error.lineno}: not valid JSON: {error.msg} (column {error.colno})"
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: {error}") from None


def _array_rows(text: str, start: int, file: Path, strict: json.JSONDecoder) -> Iterator[Row]:
    """Parses the elements one by one, so that rows and errors have line numbers."""
    counted, line = 0, 1
    position = _skip_space(text, start)
    while text[position : position + 1] != "]":
        line += text.count("\n", counted, position)
        counted = position
        with _json_errors(file, f"{file}:{line}"):
            value, end = strict.raw_decode(text, position)
            require_shallow(value, text[position:end])
        yield _of_value(value, str(file), line)
        position = _skip_space(text, end)
        following = text[position : position + 1]
        if following == ",":
            position = _skip_space(text, position + 1)
        elif following != "]":
            line += text.count("\n", counted, position)
            found = repr(following) if following else "the end: is the file truncated?"
            raise DataError(f"{file}:{line}: not valid JSON: expected ',' or ']' after a row, found {found}")
    try:  # what is around the array: nothing, or {"data": [...], ...}
        strict.decode(f"{text[: start - 1]}null{text[position + 1 :]}")
    except (ValueError, RecursionError) as error:
        said = getattr(error, "msg", error)
        raise DataError(f"{file}: not valid JSON after the array of rows: {said}") from None


def _skip_space(text: str, start: int) -> int:
    return WHITESPACE.match(text, start).end()  # type: ignore[union-attr]  # matches the empty string too
