"""Files, folders and Hub datasets -> raw rows, each with its file and line; independent of the row format.

JSONL, CSV and Parquet are streamed, so memory is bounded by the longest row; a JSON array is loaded as one
string.
"""

import csv
import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sft_play.config.data import Streaming
from sft_play.config.inputs import BUILTIN, DataInput
from sft_play.data.hub_rows import HubRows, load_hub_rows
from sft_play.data.rows import OPTIONAL, Row, decoding, read_json, read_jsonl, require_shallow
from sft_play.errors import DataError, first_line
from sft_play.units import counted

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv")
TEXT_SUFFIXES = (".txt", ".md")  # raw text, a document each
HUB_NAME = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+)(?::(?P<config>[\w.-]*)(?::(?P<split>[\w.-]+))?)?"
)
UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
BLOCK_BYTES = 1 << 20
SECTION_CHARACTERS = 1 << 15  # of long text: neither reading nor tokenizing needs memory for all of it


@dataclass(frozen=True)
class Source:
    """What a data path stands for: local files, or one split of a Hub dataset."""

    path: str
    files: tuple[Path, ...] = ()
    hub: HubRows | None = None
    columns: Mapping[str, str] = field(default_factory=dict)  # key of a format -> its name in the rows


def opened(given: DataInput) -> Source:
    """The source of one of a run's data paths; DataError as of `open_source`."""
    source = open_source(given.path, given.split, given.key, given.hub_split, given.streaming)
    return replace(source, columns=given.columns)


def require_here(inputs: Iterable[DataInput]) -> None:
    """Raises DataError for the first data path that is neither here nor a name on the Hub; reads no rows."""
    for given in inputs:
        is_file = Path(given.path).suffix in SUFFIXES + TEXT_SUFFIXES
        if not given.path.startswith(BUILTIN) and (is_file or not HUB_NAME.fullmatch(given.path)):
            opened(given)


def open_source(
    path: str,
    split: str,
    key: str | None = None,
    hub_split: str | None = None,
    streaming: Streaming = "auto",
) -> Source:
    """Resolves a file, a folder, or a Hub dataset, which it downloads to the Hub's cache if it fits.

    `key` is the setting that the path is from, for messages. The split of a Hub dataset is named in `path` or
    by `hub_split`; otherwise it is that of `split`.

    Raises:
        DataError: there is nothing readable at `path`.
    """
    local = Path(path).expanduser()
    key = key or f"data.{split}_path"
    try:
        is_dir, is_file = local.is_dir(), local.is_file()
    except (OSError, ValueError) as error:  # the name is too long or has a NUL byte
        raise DataError(f"{key}: {path[:100]!r} is not a usable path: {error}") from None
    if hub_split and (is_dir or is_file):
        raise DataError(f"{key}: split={hub_split} is for Hub datasets, but {path} is local; remove split")
    if is_dir:
        return Source(path, tuple(_checked(file, key) for file in _files_in(local, key)))
    if is_file:
        return Source(path, (_checked(local, key),))
    named = HUB_NAME.fullmatch(path)
    if local.exists() or named is None or local.suffix in SUFFIXES + TEXT_SUFFIXES:
        what = "is neither a file nor a folder" if local.exists() else "does not exist"
        raise DataError(
            f"{key}: {path!r} {what} (looked in {Path.cwd()}).\n"
            f"Use a file ({', '.join(SUFFIXES)}; raw text: {', '.join(TEXT_SUFFIXES)}), a folder of such "
            "files, or a Hub dataset as org/name[:config[:split]]"
        )
    wanted = named["split"] or hub_split
    hub = load_hub_rows(named["name"], named["config"] or None, wanted, split, key, streaming)
    return Source(path, hub=hub)


def _files_in(folder: Path, key: str) -> list[Path]:
    """The data files in a folder; if it has none, the text files in it and in the folders below."""
    try:
        paths = sorted(folder.iterdir())
        files = [path for path in paths if path.suffix.lower() in SUFFIXES and _is_there(path, key)]
        files = files or [
            path
            for path in documents_in(folder, TEXT_SUFFIXES)
            if _is_there(path, key) and path.stat().st_size
        ]
    except OSError as error:
        raise DataError(f"{key}: folder {folder} cannot be read: {error.strerror}") from None
    if not files:
        expected = ", ".join(SUFFIXES + TEXT_SUFFIXES)
        raise DataError(f"{key}: folder {folder} has no data files; expected {expected}")
    return files


def _is_there(path: Path, key: str) -> bool:
    """Whether a path in a folder is a file; a link to nothing is an error: its rows would be missing."""
    if _is_broken(path):
        raise DataError(
            f"{key}: {path} is a link to {path.readlink()}, which does not exist; remove the link"
        )
    return path.is_file()


def _is_broken(path: Path) -> bool:
    return path.is_symlink() and not path.exists()


def documents_in(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """The files and broken links with one of these suffixes in a folder and below, sorted, no hidden ones."""
    found = (path for path in folder.rglob("*") if path.suffix.lower() in suffixes)
    return sorted(
        path
        for path in found
        if "/." not in f"/{path.relative_to(folder).as_posix()}" and (path.is_file() or _is_broken(path))
    )


def _checked(file: Path, key: str) -> Path:
    allowed = SUFFIXES + TEXT_SUFFIXES
    if file.suffix.lower() not in allowed:
        raise DataError(
            f"{key}: {file} has the extension {file.suffix or '(none)'}; allowed: {', '.join(allowed)}"
        )
    try:
        with file.open("rb") as opened:
            head = opened.read(4)
    except OSError as error:
        raise DataError(f"{key}: {file} cannot be read: {error.strerror}") from None
    if not head:
        raise DataError(f"{key}: {file} is empty (0 bytes)")
    if head.startswith(UTF16_BOMS) and file.suffix.lower() != ".parquet":
        raise DataError(f"{file} is UTF-16; expected UTF-8. Convert it: iconv -f UTF-16 -t UTF-8 {file.name}")
    return file


def fingerprint(source: Source) -> tuple[str, int | None]:
    """A digest of file names (without folders) and bytes, and an estimate of the rows if it is cheap."""
    digest = hashlib.sha256()
    if source.hub is not None:
        digest.update(f"{source.path} {source.hub.version}".encode())
        return digest.hexdigest(), source.hub.count
    rows: int | None = 0
    for file in source.files:
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        newlines = 0
        with file.open("rb") as opened:
            while block := opened.read(BLOCK_BYTES):
                digest.update(block)
                newlines += block.count(b"\n")
        if file.suffix.lower() == ".parquet":
            newlines = _open_parquet(file).metadata.num_rows
        is_counted = file.suffix.lower() not in (".json", *TEXT_SUFFIXES)
        rows = rows + max(newlines, 1) if rows is not None and is_counted else None
    return digest.hexdigest(), rows


def read_rows(source: Source, limit: int | None = None, notes: Counter[str] | None = None) -> Iterator[Row]:
    """All rows in order, at most `limit` of each file; `notes` counts blank lines and NaN values.

    Raises:
        DataError: a row cannot be read; names file and line.
    """
    if notes is None:
        notes = Counter()
    rows = _as_they_are(source, limit, notes)
    if not source.columns:
        return rows
    return (_renamed(row, source.columns) for row in rows)


def _renamed(row: Row, columns: Mapping[str, str]) -> Row:
    """The row with the keys of its format in place of those of the data.

    Raises:
        DataError: the row lacks one that is not optional.
    """
    data = dict(row.data)
    named = {key: data.pop(name) for key, name in columns.items() if name in data}
    missing = [key for key in columns if key not in named and key not in OPTIONAL]
    if missing:
        raise DataError(
            f"{row.where}: data.columns.{missing[0]} is {columns[missing[0]]!r}, which is no key of the row: "
            f"{', '.join(row.data) or '(none)'}"
        )
    return replace(row, data=data | named)


def _as_they_are(source: Source, limit: int | None, notes: Counter[str]) -> Iterator[Row]:
    if source.hub is not None:
        rows = (Row(_without_none(data), source.path, number) for number, data in enumerate(source.hub, 1))
        yield from itertools.islice(rows, limit)
        return
    readers = {".parquet": _read_parquet, ".csv": _read_csv, ".json": read_json}
    readers |= dict.fromkeys(TEXT_SUFFIXES, _read_text)
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
        for text, last in sections(iter(lambda: opened.read(BLOCK_BYTES), "")):
            yield Row({"text": text}, str(file), line, begins, last)
            line, begins = line + text.count("\n"), False


def _read_csv(file: Path, notes: Counter[str]) -> Iterator[Row]:
    csv.field_size_limit(1 << 30)
    with decoding(file), file.open(encoding="utf-8-sig", newline="") as opened:
        reader = csv.DictReader(opened, restkey="", strict=True)
        line = 1
        try:
            header = reader.fieldnames or []
            if len(set(header)) < len(header):
                raise DataError(f"{file}:1: duplicate column name in {', '.join(header)}")
            line = reader.line_num + 1
            for record in reader:
                if "" in record or None in record.values():
                    raise DataError(f"{file}:{line}: {_wrong_fields(header)}")
                yield Row(_parsed_cells(record, f"{file}:{line}"), str(file), line)
                line = reader.line_num + 1
        except csv.Error as error:
            raise DataError(f"{file}:{line}: not valid CSV: {error}") from None


def _wrong_fields(header: Sequence[str]) -> str:
    """What is wrong with a line of a CSV file that has another number of fields than the header."""
    expected = f"expected {counted(len(header), 'field')} ({', '.join(header)}), found a different number"
    other = next((mark for mark in (";", "\t", "|") if len(header) == 1 and mark in header[0]), None)
    if other is None:
        return expected
    return f"{expected}; separate them with commas instead of {other!r}"


def _parsed_cells(record: dict[str, str], where: str) -> dict[str, Any]:
    """Parses cells that hold JSON, the only way to have conversations in a CSV file."""
    parsed: dict[str, Any] = dict(record)
    for key in {"messages", "conversations", "tools"} & parsed.keys():
        try:
            cell = parsed[key]
            parsed[key] = require_shallow(json.loads(cell), cell) if cell else None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: column {key!r} is not valid JSON: {error}") from None
    return parsed


def _open_parquet(file: Path) -> Any:
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: not a readable Parquet file: {first_line(error)}") from None


def _read_parquet(file: Path, notes: Counter[str]) -> Iterator[Row]:
    number = 0
    try:
        for batch in _open_parquet(file).iter_batches(batch_size=1000):
            for data in batch.to_pylist():
                number += 1
                yield Row(_without_none(data), str(file), number)
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read after row {number}: {first_line(error)}") from None


def _without_none(value: Any) -> Any:
    """Drops None values: columnar files give every struct all keys that any row has."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value
