"""Data paths -> what they stand for: files, files of a split in a folder, or a split of a Hub dataset.

Where the training data comes with validation and test rows of its own, these are used as such.
"""

import hashlib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sft_play.config.data import DataConfig, Streaming
from sft_play.config.inputs import BUILTIN, DataInput, data_inputs
from sft_play.data.folders import (
    NO_SPLIT,
    ROW_KINDS,
    SHOWN,
    SPLIT_NAMES,
    SUFFIXES,
    TEXT_SUFFIXES,
    UNNAMED,
    read_folder,
)
from sft_play.data.hub_rows import HubRows, load_hub_rows
from sft_play.errors import DataError
from sft_play.rows.tables import open_parquet
from sft_play.units import listed

HUB_NAME = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+)(?::(?P<config>[\w.-]*)(?::(?P<split>[\w.-]+))?)?"
)
FOLDER_AND_SPLIT = re.compile(r"(?P<folder>.+)::(?P<split>[\w.-]+)")
LFS_POINTER = b"version https://git-lfs.github.com/"  # how files of a clone begin without its large ones
UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Source:
    """What a data path stands for: local files, or one split of a Hub dataset."""

    path: str
    files: tuple[Path, ...] = ()
    hub: HubRows | None = None
    columns: Mapping[str, str] = field(default_factory=dict)  # key of a format -> its name in the rows
    folder: Path | None = None  # that the files are in, if the path names it
    split: str = NO_SPLIT  # its name, where there are several splits
    others: tuple[str, ...] = ()  # their names, unless this one was asked for by its own
    remarks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # on the files of the folder


def open_inputs(data: DataConfig) -> list[tuple[DataInput, Source]]:
    """The data paths of a run, and the splits for validation and testing that its training data comes with.

    Raises:
        DataError: as of `open_source`.
    """
    inputs = data_inputs(data)
    found = [pair for given in inputs for pair in open_input(given, inputs)]
    return sorted(found, key=lambda pair: list(SPLIT_NAMES).index(pair[0].split))


def open_input(given: DataInput, inputs: Sequence[DataInput]) -> list[tuple[DataInput, Source]]:
    """One of a run's data paths; with training data that names no split, also its splits for other uses.

    Only for uses that none of the `inputs` of the run has. DataError as of `open_source`.
    """
    splits, wanted = _splits(given.path, given.key, given.asked_split, given.streaming)
    first = _chosen(splits, wanted, given.path, given.split, given.key)
    found = [(given, first)]
    used = {other.split for other in inputs}
    for split in SPLIT_NAMES:
        name = next((name for name in SPLIT_NAMES[split] if name in splits), None)
        if given.split == "train" and wanted is None and split not in used and name is not None:
            key, alone = f"{given.key} (split {name})", with_split(given.path, first.split)
            own = replace(given, key=key, split=split, weight=1.0, alone=alone)
            found.append((own, _chosen(splits, None, given.path, split, key)))
    return [(each, replace(source, columns=each.columns)) for each, source in found]


def opened(given: DataInput) -> Source:
    """The source of one of a run's data paths; DataError as of `open_source`."""
    source = open_source(given.path, given.split, given.key, given.asked_split, given.streaming)
    return replace(source, columns=given.columns)


def require_here(inputs: Iterable[DataInput]) -> None:
    """Raises DataError for the first data path that is neither here nor a name on the Hub; reads no rows."""
    for given in inputs:
        is_file = Path(given.path).suffix in SUFFIXES + TEXT_SUFFIXES
        if not given.path.startswith(BUILTIN) and (is_file or not HUB_NAME.fullmatch(given.path)):
            opened(given)


def is_local(path: str) -> bool:
    """Whether a data path is a file or a folder, or a split of a folder, that is here."""
    local, _ = _local(path)
    return local.exists()


def open_source(
    path: str,
    split: str,
    key: str | None = None,
    wanted: str | None = None,
    streaming: Streaming = "auto",
) -> Source:
    """Resolves a file, a folder, or a Hub dataset, which it downloads to the Hub's cache if it fits.

    `key` is the setting that the path is from, for messages. One of several splits is named in `path` or by
    `wanted`; otherwise it is that of `split`: train, val or test.

    Raises:
        DataError: there is nothing readable at `path`, or no such split.
    """
    key = key or f"data.{split}_path"
    splits, wanted = _splits(path, key, wanted, streaming)
    return _chosen(splits, wanted, path, split, key)


def _local(path: str) -> tuple[Path, str | None]:
    """A path with the split that it names: only folders have any."""
    local, named = Path(path).expanduser(), FOLDER_AND_SPLIT.fullmatch(path)
    if named and not local.exists() and (folder := Path(named["folder"]).expanduser()).is_dir():
        return folder, named["split"]
    return local, None


def _splits(
    path: str, key: str, wanted: str | None, streaming: Streaming
) -> tuple[Mapping[str, Source], str | None]:
    """The splits at a path by their names, NO_SPLIT if it has none, and which one is asked for, if any."""
    try:
        local, named = _local(path)
        is_dir, is_file = local.is_dir(), local.is_file()
    except (OSError, ValueError) as error:  # the name is too long or has a NUL byte
        raise DataError(f"{key}: {path[:100]!r} is not a usable path: {error}") from None
    if is_file:
        return {NO_SPLIT: Source(path, (local,))}, wanted
    if is_dir:
        folder = read_folder(local, key)
        splits = {
            name: Source(path, files, folder=local, split=name, remarks=folder.remarks)
            for name, files in folder.splits.items()
        }
        return splits, named or wanted
    on_hub = HUB_NAME.fullmatch(path)
    if local.exists() or on_hub is None or local.suffix in SUFFIXES + TEXT_SUFFIXES:
        what = "is neither a file nor a folder" if local.exists() else "does not exist"
        raise DataError(
            f"{key}: {path!r} {what} (looked in {Path.cwd()}).\n"
            f"Use a file ({', '.join(SUFFIXES)}; raw text: {', '.join(TEXT_SUFFIXES)}), a folder of such "
            f"files, or a Hub dataset as org/name[:config[:split]]{_or_none(key)}"
        )
    rows = load_hub_rows(on_hub["name"], on_hub["config"] or None, key, streaming)
    splits = {name: Source(path, hub=hub, split=name) for name, hub in rows.items()}
    return splits, on_hub["split"] or wanted


def _or_none(key: str) -> str:
    """That a path of held-out rows need not be given."""
    found = re.fullmatch(r"data\.(val|test)_path", key)
    share = f"data.{found[1]}_fraction" if found else ""
    return f"; or leave it empty ({key}=), to hold out {share} of the training rows" if found else ""


def _chosen(splits: Mapping[str, Source], wanted: str | None, path: str, split: str, key: str) -> Source:
    """The split `wanted`, or else the one for `split`, or all if there are none.

    Raises:
        DataError: there is no such split, or a file of it cannot be read.
    """
    if NO_SPLIT in splits and wanted:
        raise DataError(f"{key}: {path} has no splits, but split {wanted} was asked for; remove the split")
    names = (wanted,) if wanted else (NO_SPLIT, *SPLIT_NAMES[split])
    found = next((name for name in names if name in splits), None)
    if found is None:
        raise DataError(_no_split(splits, wanted, path, split, key))
    source = splits[found]
    for file in source.files:
        _require_readable(file, key)
    return source if wanted else replace(source, others=tuple(name for name in splits if name != found))


def _no_split(splits: Mapping[str, Source], wanted: str | None, path: str, split: str, key: str) -> str:
    source = next(iter(splits.values()))
    unnamed = source.remarks.get(UNNAMED, ())
    rest = f", and {listed(unnamed, SHOWN)}, which names none" if unnamed else ""
    choice = with_split(path, "<split>") + (", or a file in it" if source.folder else "")
    return (
        f"{key}: {path} has no split {wanted or ' or '.join(SPLIT_NAMES[split])}; it has "
        f"{', '.join(splits)}{rest}. Choose one: {choice}"
    )


def with_split(path: str, split: str) -> str:
    """A data path that names a split, in place of the one that it names already."""
    on_hub = HUB_NAME.fullmatch(path)
    if on_hub and not is_local(path):
        return f"{on_hub['name']}:{on_hub['config'] or ''}:{split}"
    named = FOLDER_AND_SPLIT.fullmatch(path)
    return f"{named['folder'] if named else path}::{split}"


def _require_readable(file: Path, key: str) -> None:
    allowed = SUFFIXES + TEXT_SUFFIXES
    if file.suffix.lower() not in allowed:
        raise DataError(
            f"{key}: {file} has the extension {file.suffix or '(none)'}; allowed: {', '.join(allowed)}"
        )
    try:
        with file.open("rb") as opened:
            head = opened.read(len(LFS_POINTER))
    except OSError as error:
        raise DataError(f"{key}: {file} cannot be read: {error.strerror}") from None
    if not head:
        raise DataError(f"{key}: {file} is empty (0 bytes)")
    if head == LFS_POINTER:
        raise DataError(
            f"{key}: {file} is not the data but a pointer to it, of Git LFS; fetch it: git lfs pull"
        )
    if head.startswith(UTF16_BOMS) and ROW_KINDS.get(file.suffix.lower()) not in ("Parquet", "Arrow"):
        converted = file.with_name(f"{file.stem}.utf8{file.suffix}")
        raise DataError(
            f"{key}: {file} is UTF-16; expected UTF-8. Convert it, and use the new file in its place:\n"
            f"  iconv -f UTF-16 -t UTF-8 {shlex.quote(str(file))} > {shlex.quote(str(converted))}"
        )


def fingerprint(source: Source) -> tuple[str, int | None]:
    """A digest of files, by name and bytes, and an estimate of the rows if it is cheap.

    Where a file is in the folder of the path counts: pictures of its rows are found from there.
    """
    digest = hashlib.sha256()
    if source.hub is not None:
        digest.update(f"{source.path} {source.hub.version}".encode())
        return digest.hexdigest(), source.hub.count
    rows: int | None = 0
    for file in source.files:
        name = file.relative_to(source.folder or file.parent)
        digest.update(f"{name} {file.stat().st_size}\n".encode())
        newlines = 0
        with file.open("rb") as opened:
            while block := opened.read(BLOCK_BYTES):
                digest.update(block)
                newlines += block.count(b"\n")
        suffix = file.suffix.lower()
        if suffix == ".parquet":
            newlines = open_parquet(file).metadata.num_rows
        is_counted = suffix not in (".json", ".arrow", *TEXT_SUFFIXES)
        rows = rows + max(newlines, 1) if rows is not None and is_counted else None
    return digest.hexdigest(), rows
