"""Sources -> raw rows, each with its file and line; independent of the row format.

JSONL, CSV, Parquet and Arrow files are streamed, so memory is bounded by the longest row; a JSON array is
loaded as one string.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from sft_play.data.folders import TEXT_SUFFIXES
from sft_play.data.sources import Source
from sft_play.rows.formats import OPTIONAL
from sft_play.rows.json_files import Row, decoding, read_json, read_jsonl
from sft_play.rows.tables import as_json, read_arrow, read_csv, read_parquet

BLOCK_CHARACTERS = 1 << 20
SECTION_CHARACTERS = 1 << 15  # of long text: neither reading nor tokenizing needs memory for all of it


def read_rows(source: Source, limit: int | None = None, notes: Counter[str] | None = None) -> Iterator[Row]:
    """All rows in order, at most `limit` of each file.

    `notes` counts blank lines, NaN values, and columns of row numbers. A row that cannot be read, while
    others can, has a problem.

    Raises:
        DataError: a file cannot be read; names file and line.
    """
    if notes is None:
        notes = Counter()
    rows = _as_they_are(source, limit, notes)
    if not source.columns:
        return rows
    return (_renamed(row, source.columns) for row in rows)


def _renamed(row: Row, columns: Mapping[str, str]) -> Row:
    """The row with the keys of its format in place of those of the data; one may lack optional ones only."""
    if row.problem:
        return row
    data = dict(row.data)
    named = {key: data.pop(name) for key, name in columns.items() if name in data}
    missing = [key for key in columns if key not in named and key not in OPTIONAL]
    if missing:
        problem = (
            f"{row.where}: data.columns.{missing[0]} is {columns[missing[0]]!r}, which is not a key of the "
            f"row: {', '.join(row.data) or '(none)'}"
        )
        return replace(row, problem=problem)
    return replace(row, data=data | named)


def _as_they_are(source: Source, limit: int | None, notes: Counter[str]) -> Iterator[Row]:
    if source.hub is not None:
        rows = (Row(as_json(data, notes), source.path, number) for number, data in enumerate(source.hub, 1))
        yield from itertools.islice(rows, limit)
        return
    readers = {".parquet": read_parquet, ".arrow": read_arrow, ".json": read_json}
    readers |= dict.fromkeys((".csv", ".tsv"), read_csv) | dict.fromkeys(TEXT_SUFFIXES, _read_text)
    for file in source.files:
        reader = readers.get(file.suffix.lower(), read_jsonl)
        yield from itertools.islice(reader(file, notes), limit)


def sections(blocks: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Text that comes in blocks, in sections, each with whether it is the last; blank ones are left out.

    A section ends at a line break, or at a space if a line is longer than a section.
    """
    held = None
    for section in _cut(blocks):
        if section.strip():
            if held is not None:
                yield held, False
            held = section
    if held is not None:
        yield held, True


def _cut(blocks: Iterable[str]) -> Iterator[str]:
    text = ""
    for block in blocks:
        text += block
        while len(text) > SECTION_CHARACTERS:
            end = text.rfind("\n", 0, SECTION_CHARACTERS) + 1 or text.rfind(" ", 1, SECTION_CHARACTERS)
            if end <= 0:
                end = SECTION_CHARACTERS
            yield text[:end]
            text = text[end:]
    yield text


def _read_text(file: Path, notes: Counter[str]) -> Iterator[Row]:
    """A document, in sections if it is long."""
    with decoding(file), file.open(encoding="utf-8-sig") as opened:
        line, begins = 1, True
        for text, last in sections(iter(lambda: opened.read(BLOCK_CHARACTERS), "")):
            yield Row({"text": text}, str(file), line, begins, last)
            line, begins = line + text.count("\n"), False
