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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_play.data.nesting import require_shallow
from sft_play.errors import DataError
from sft_play.hub import limit_network

if TYPE_CHECKING:
    import datasets

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv")
HUB_NAME = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+)(?::(?P<config>[\w.-]*)(?::(?P<split>[\w.-]+))?)?"
)
HUB_SPLITS = {"train": ("train",), "val": ("validation", "valid", "val", "dev"), "test": ("test",)}
UTF8_BOM, UTF16_BOMS = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")
BLOCK_BYTES = 1 << 20
WHITESPACE = re.compile(r"\s*")
ARRAY_START = re.compile(r'\s*(?:\{\s*"data"\s*:\s*)?\[')


@dataclass(frozen=True)
class Row:
    """One raw row; `line` is 1-based (for Parquet files and Hub datasets it is the row number)."""

    data: dict[str, Any]
    file: str
    line: int

    @property
    def where(self) -> str:
        """`file:line`, which editors can jump to."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Source:
    """What a data path stands for: local files, or one split of a Hub dataset."""

    path: str
    files: tuple[Path, ...] = ()
    hub: "datasets.Dataset | None" = None


def open_source(path: str, split: str) -> Source:
    """Resolves `path` to files; downloads a Hub dataset to the Hub's cache.

    `split` is train, val or test; it selects the split of a Hub dataset if `path` does not name one.

    Raises:
        DataError: there is nothing readable at `path`.
    """
    local = Path(path).expanduser()
    key = f"data.{split}_path"
    try:
        is_dir, is_file = local.is_dir(), local.is_file()
    except (OSError, ValueError) as error:  # the name is too long or has a NUL byte
        raise DataError(f"{key}: {path[:100]!r} is not a usable path: {error}") from None
    if is_dir:
        return Source(path, tuple(_checked(file, key) for file in _files_in(local, key)))
    if is_file:
        return Source(path, (_checked(local, key),))
    named = HUB_NAME.fullmatch(path)
    if local.exists() or named is None or local.suffix in SUFFIXES:
        what = "is neither a file nor a folder" if local.exists() else "does not exist"
        raise DataError(
            f"{key}: {path!r} {what} (looked in {Path.cwd()}).\n"
            f"Use a file ({', '.join(SUFFIXES)}), a folder of such files, or a Hub dataset as "
            "org/name[:config[:split]]"
        )
    return Source(path, hub=_load_from_hub(named["name"], named["config"] or None, named["split"], split))


def _files_in(folder: Path, key: str) -> list[Path]:
    try:
        paths = sorted(folder.iterdir())
        files = [path for path in paths if path.is_file() and path.suffix.lower() in SUFFIXES]
    except OSError as error:
        raise DataError(f"{key}: folder {folder} cannot be read: {error.strerror}") from None
    if not files:
        raise DataError(f"{key}: folder {folder} has no data files; expected {', '.join(SUFFIXES)}")
    return files


def _checked(file: Path, key: str) -> Path:
    if file.suffix.lower() not in SUFFIXES:
        raise DataError(
            f"{key}: {file} has the extension {file.suffix or '(none)'}; allowed: {', '.join(SUFFIXES)}"
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


def _load_from_hub(name: str, config: str | None, wanted: str | None, split: str) -> "datasets.Dataset":
    import datasets

    limit_network()
    try:
        loaded = datasets.load_dataset(name, config)
    except Exception as error:  # the Hub client raises a dozen unrelated classes
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"data.{split}_path: '{name}' is not a local file, and loading it as a Hub dataset failed: "
            f"{first_line}"
        ) from None
    for candidate in (wanted,) if wanted else HUB_SPLITS[split]:
        if candidate in loaded:
            return loaded[candidate]
    raise DataError(
        f"data.{split}_path: dataset '{name}' has no split {wanted or ' or '.join(HUB_SPLITS[split])}; "
        f"it has {', '.join(loaded)}. Choose one: {name}:{config or ''}:<split>"
    )


def fingerprint(source: Source) -> tuple[str, int | None]:
    """A digest of file names (without folders) and bytes, and an estimate of the rows if it is cheap."""
    digest = hashlib.sha256()
    if source.hub is not None:
        digest.update(f"{source.path} {source.hub._fingerprint}".encode())
        return digest.hexdigest(), len(source.hub)
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
        rows = None if rows is None or file.suffix.lower() == ".json" else rows + max(newlines, 1)
    return digest.hexdigest(), rows


def read_rows(source: Source, limit: int | None = None, notes: Counter[str] | None = None) -> Iterator[Row]:
    """All rows in order, at most `limit` of each file; `notes` counts blank lines and NaN values.

    Raises:
        DataError: a row cannot be read; names file and line.
    """
    notes = Counter() if notes is None else notes
    if source.hub is not None:
        rows = (Row(_without_none(data), source.path, number) for number, data in enumerate(source.hub, 1))
        yield from itertools.islice(rows, limit)
        return
    readers = {".parquet": _read_parquet, ".csv": _read_csv, ".json": _read_json}
    for file in source.files:
        reader = readers.get(file.suffix.lower(), _read_jsonl)
        yield from itertools.islice(reader(file, notes), limit)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        repeated = counts.most_common(1)[0][0]
        raise ValueError(f"duplicate key {repeated!r} in one object; keep one")
    return data


def _decoder(notes: Counter[str]) -> json.JSONDecoder:
    def constant(name: str) -> None:
        notes[f"{name} values, read as null"] += 1

    return json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=constant)


def _utf8(raw: bytes, where: str, offset: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: byte {raw[error.start]:#04x} at offset {offset + error.start} is not UTF-8"
        ) from None


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def _read_jsonl(file: Path, notes: Counter[str]) -> Iterator[Row]:
    decoder, offset = _decoder(notes), 0
    with file.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            content = raw.removeprefix(UTF8_BOM) if number == 1 else raw
            where = f"{file}:{number}"
            text = _utf8(content, where, offset + len(raw) - len(content)).strip()
            offset += len(raw)
            if not text:
                notes["blank lines"] += 1
                continue
            if number == 1 and text.startswith("["):  # an array in a .jsonl file
                yield from _read_json_whole(file, notes)
                return
            try:
                value = require_shallow(decoder.decode(text), text)
            except json.JSONDecodeError as error:
                cut = "" if raw.endswith(b"\n") else " The line has no final newline: is the file truncated?"
                raise DataError(
                    f"{where}: not valid JSON: {error.msg} at character {error.pos + 1}.{cut}"
                ) from None
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: {error}") from None
            yield Row(_object(value, where), str(file), number)


def _read_json(file: Path, notes: Counter[str]) -> Iterator[Row]:
    """A .json file is an array, {"data": [...]}, or (as is common) JSON lines with the wrong extension."""
    with file.open("rb") as lines:
        first = next((line for line in lines if line.removeprefix(UTF8_BOM).strip()), b"")
    try:
        value = json.loads(first.removeprefix(UTF8_BOM))
    except (ValueError, RecursionError):
        value = None
    is_lines = isinstance(value, dict) and not isinstance(value.get("data"), list)
    yield from _read_jsonl(file, notes) if is_lines else _read_json_whole(file, notes)


def _read_json_whole(file: Path, notes: Counter[str]) -> Iterator[Row]:
    raw = file.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        _utf8(raw, f"{file}:{line}", 0)
        raise
    del raw
    start = ARRAY_START.match(text)
    if start:
        yield from _array_rows(text, start.end(), file, _decoder(notes))
        return
    try:
        value = _object(require_shallow(_decoder(notes).decode(text), text), f"{file}:1")
    except json.JSONDecodeError as error:
        raise DataError(
            f"{file}:{error.lineno}: not valid JSON: {error.msg} (column {error.colno})"
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: {error}") from None
    rows = value["data"] if isinstance(value.get("data"), list) else [value]
    for number, row in enumerate(rows, 1):
        yield Row(_object(row, f"{file}, row {number}"), str(file), number)


def _array_rows(text: str, start: int, file: Path, decoder: json.JSONDecoder) -> Iterator[Row]:
    """Parses the elements one by one, so that rows and errors have line numbers."""
    counted, line = 0, 1
    position = _skip_space(text, start)
    while text[position : position + 1] != "]":
        line += text.count("\n", counted, position)
        counted = position
        try:
            value, end = decoder.raw_decode(text, position)
            require_shallow(value, text[position:end])
        except json.JSONDecodeError as error:
            raise DataError(
                f"{file}:{error.lineno}: not valid JSON: {error.msg} (column {error.colno})"
            ) from None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{file}:{line}: {error}") from None
        yield Row(_object(value, f"{file}:{line}"), str(file), line)
        position = _skip_space(text, end)
        following = text[position : position + 1]
        if following == ",":
            position = _skip_space(text, position + 1)
        elif following != "]":
            line += text.count("\n", counted, position)
            found = repr(following) if following else "the end: is the file truncated?"
            raise DataError(f"{file}:{line}: not valid JSON: expected ',' or ']' after a row, found {found}")
    rest = text[_skip_space(text, position + 1) :][:1]
    if rest and rest not in ",}":  # what follows the array in {"data": [...], ...}
        raise DataError(f"{file}: not valid JSON: {rest!r} after the array of rows")


def _skip_space(text: str, start: int) -> int:
    return WHITESPACE.match(text, start).end()  # type: ignore[union-attr]  # matches the empty string too


def _read_csv(file: Path, notes: Counter[str]) -> Iterator[Row]:
    csv.field_size_limit(1 << 30)
    with file.open(encoding="utf-8-sig", newline="") as opened:
        reader = csv.DictReader(opened, restkey="", strict=True)
        line = 1
        try:
            header = reader.fieldnames or []
            if len(set(header)) < len(header):
                raise DataError(f"{file}:1: duplicate column name in {', '.join(header)}")
            line = reader.line_num + 1
            for record in reader:
                if "" in record or None in record.values():
                    raise DataError(
                        f"{file}:{line}: expected {len(header)} fields ({', '.join(header)}), found a "
                        "different number"
                    )
                yield Row(_parsed_cells(record, f"{file}:{line}"), str(file), line)
                line = reader.line_num + 1
        except csv.Error as error:
            raise DataError(f"{file}:{line}: not valid CSV: {error}") from None
        except UnicodeDecodeError:
            _first_bad_line(file)
            raise


def _first_bad_line(file: Path) -> None:
    with file.open("rb") as lines:
        offset = 0
        for number, raw in enumerate(lines, 1):
            _utf8(raw, f"{file}:{number}", offset)
            offset += len(raw)


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
        raise DataError(f"{file}: not a readable Parquet file: {str(error).splitlines()[0]}") from None


def _read_parquet(file: Path, notes: Counter[str]) -> Iterator[Row]:
    number = 0
    try:
        for batch in _open_parquet(file).iter_batches(batch_size=1000):
            for data in batch.to_pylist():
                number += 1
                yield Row(_without_none(data), str(file), number)
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read after row {number}: {str(error).splitlines()[0]}") from None


def _without_none(value: Any) -> Any:
    """Drops None values: columnar files give every struct all keys that any row has."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value
