"""Files of columns -> raw rows: CSV with whatever separates its fields, Parquet, and Arrow."""

import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import date, time, timedelta
from decimal import Decimal
from math import isfinite
from pathlib import Path
from typing import Any, TextIO

from sft_play.errors import DataError, first_line
from sft_play.rows.formats import FORMATS
from sft_play.rows.json_files import Row, as_null, decoding
from sft_play.rows.strict_json import parse
from sft_play.units import counted

SEPARATORS = ",;\t|"
ROW_NUMBER = re.compile(r"-?\d+")
NUMBERED = "with their number in a first column without a name, which is left out"
BATCH_ROWS = 1000
JSON_TEXT = "arrow.json"
JSON_COLUMNS = {known.prompt for known in FORMATS.values() if known.prompt and not known.answer} | {"tools"}
AS_IN_JSON, AS_TEXT = (str, int, type(None)), (date, time, timedelta, Decimal)
ARROW_FILE = b"ARROW1"  # how an Arrow file begins that is no stream


def read_csv(file: Path, notes: Counter[str]) -> Iterator[Row]:
    """A row a record; `notes` counts those that begin with their number, as pandas writes them."""
    csv.field_size_limit(1 << 30)
    with decoding(file), file.open(encoding="utf-8-sig", newline="") as opened:
        line = 1
        try:
            marks = "\t" if file.suffix.lower() == ".tsv" else SEPARATORS
            reader = csv.reader(opened, delimiter=_separator(opened, marks), strict=True)
            header = next(filter(None, reader), [])
            numbered = _begins_with_numbers(header, f"{file}:{reader.line_num}")
            line = reader.line_num + 1
            for cells in reader:
                if cells:
                    yield _csv_row(header, cells, Row({}, str(file), line))
                    notes[NUMBERED] += numbered
                line = reader.line_num + 1
        except csv.Error as error:
            raise DataError(f"{file}:{line}: not valid CSV: {error}") from None


def _csv_row(header: Sequence[str], cells: Sequence[str], row: Row) -> Row:
    """The row of a record, without the number of a first column that has no name."""
    try:
        record = _record(header, cells, row.where)
        if "" in record:
            _require_number(record.pop(""), row.where)
    except DataError as error:
        return replace(row, problem=str(error))
    return replace(row, data=record)


def _separator(opened: TextIO, marks: str) -> str:
    """The first of `marks` that the header of an open file has outside quotes; the first of all if none."""
    for mark in marks:
        header = next(filter(None, csv.reader(opened, delimiter=mark)), [])
        opened.seek(0)
        if len(header) > 1:
            return mark
    return marks[0]


def _begins_with_numbers(header: Sequence[str], where: str) -> bool:
    """Whether the first column has no name, so that it is the index that pandas writes.

    Raises:
        DataError: another column has no name, or two have the same.
    """
    _require_distinct(header, where)
    if "" in header[1:]:
        raise DataError(f"{where}: column {header.index('') + 1} has no name; name it, or remove it")
    return len(header) > 1 and not header[0]


def _require_distinct(names: Sequence[str], where: str) -> None:
    if len(set(names)) < len(names):
        raise DataError(f"{where}: duplicate column name in {', '.join(names)}")


def _require_number(cell: str, where: str) -> None:
    if not ROW_NUMBER.fullmatch(cell):
        raise DataError(
            f"{where}: the first column has no name, so it should count the rows, but here it is "
            f"{cell[:40]!r}; name it in the first line, or remove it"
        )


def _record(header: Sequence[str], cells: Sequence[str], where: str) -> dict[str, Any]:
    """The cells by column; those that hold JSON, the only way to have conversations in CSV, are parsed."""
    if len(cells) != len(header):
        raise DataError(
            f"{where}: expected {counted(len(header), 'field')} ({', '.join(header)}), found {len(cells)}; "
            "what has separators or line breaks in it belongs in double quotes"
        )
    record: dict[str, Any] = dict(zip(header, cells, strict=True))
    for key in JSON_COLUMNS & record.keys():
        try:
            record[key] = parse(record[key]) if record[key] else None
        except ValueError as error:
            raise DataError(f"{where}: column {key!r} is not valid JSON: {error}") from None
    return record


def open_parquet(file: Path) -> Any:
    """The ParquetFile; DataError if it is none."""
    import pyarrow.parquet

    with _readable(file, "Parquet"):
        return pyarrow.parquet.ParquetFile(file)


def read_parquet(file: Path, notes: Counter[str]) -> Iterator[Row]:
    """A row each; a row group at a time."""
    return _numbered(file, open_parquet(file).iter_batches(batch_size=BATCH_ROWS), notes)


def read_arrow(file: Path, notes: Counter[str]) -> Iterator[Row]:
    """A row each, of a stream, which is what `datasets` writes, or of an Arrow file."""
    import pyarrow as pa

    with pa.memory_map(str(file)) as mapped:
        with _readable(file, "Arrow"):
            if mapped.read(len(ARROW_FILE)) == ARROW_FILE:
                reader = pa.ipc.open_file(mapped)
                batches = map(reader.get_batch, range(reader.num_record_batches))
            else:
                mapped.seek(0)
                batches = iter(pa.ipc.open_stream(mapped))
        yield from _numbered(file, batches, notes)


@contextmanager
def _readable(file: Path, kind: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: not a readable {kind} file: {first_line(error)}") from None


def _numbered(file: Path, batches: Iterable[Any], notes: Counter[str]) -> Iterator[Row]:
    """The rows of record batches, numbered; batches may be as long as the file."""
    number = 0
    try:
        for batch in batches:
            _require_distinct(batch.schema.names, str(file))
            texts = {field.name: field.type for field in batch.schema if JSON_TEXT in str(field.type)}
            for start in range(0, batch.num_rows, BATCH_ROWS):
                for data in batch.slice(start, BATCH_ROWS).to_pylist():
                    number += 1
                    data |= {name: _parsed(data[name], kind) for name, kind in texts.items()}
                    yield Row(as_json(data, notes), str(file), number)
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read after row {number}: {first_line(error)}") from None


def _parsed(value: Any, kind: Any) -> Any:
    """A value of an Arrow type, with text parsed that is marked as JSON, as mixed types are by `datasets`."""
    import pyarrow.types as types

    if value is None:
        return None
    if getattr(kind, "extension_name", None) == JSON_TEXT:
        return parse(value)
    if types.is_struct(kind):
        return {field.name: _parsed(value[field.name], field.type) for field in kind}
    if types.is_list(kind) or types.is_large_list(kind):
        return [_parsed(item, kind.value_type) for item in value]
    return value


def as_json(value: object, notes: Counter[str]) -> Any:
    """A value of a column as a row of JSON would have it.

    Keys that are null are left out (see `without_nulls`), NaN is null, and dates and decimals are text.
    """
    if isinstance(value, AS_IN_JSON):  # most are, so this is asked first
        return value
    if isinstance(value, dict):
        return {key: found for key, item in value.items() if (found := as_json(item, notes)) is not None}
    if isinstance(value, list):
        return [as_json(item, notes) for item in value]
    if isinstance(value, float) and not isfinite(value):
        as_null({"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)], notes)
        return None
    return str(value) if isinstance(value, AS_TEXT) else value
