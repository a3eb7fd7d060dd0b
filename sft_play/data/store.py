"""The on-disk cache: Arrow files in a folder whose name is a hash of everything the content depends on."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock
import numpy as np
import pyarrow as pa

from sft_play.data.chat import IGNORED
from sft_play.errors import StorageError
from sft_play.files import publish
from sft_play.manifest import files_in, find_damage, has_manifest, hash_files, read_manifest, write_manifest
from sft_play.runlog import console

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

BATCH_ROWS = 4096  # read at a time
TOKEN_LIST = pa.list_(pa.int32())
ROWS = pa.schema({"input_ids": TOKEN_LIST, "labels": TOKEN_LIST, "length": pa.int32()})


def tokenizer_digest(tokenizer: "PreTrainedTokenizerBase") -> str:
    """A hash of vocabulary, merges, added and special tokens, and chat template."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_padding()  # set by an earlier call; no effect here
    backend.no_truncation()
    parts = [backend.to_str(), json.dumps(tokenizer.special_tokens_map), json.dumps(tokenizer.chat_template)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def content_key(parts: dict[str, Any]) -> str:
    """A folder name: a hash of `parts`."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


@contextlib.contextmanager
def building(folder: Path, *, announce: bool, hashes: bool = True) -> Iterator[Path | None]:
    """Yields a temporary folder to fill, which then becomes `folder`; None if `folder` is already complete.

    One process of this machine does the work while the others wait for the result; with `announce` they say
    so. A folder left by a killed process is removed, and so is a damaged one. Without `hashes`, only the
    sizes of its files are compared, not their content.

    Raises:
        StorageError: the cache cannot be written.
    """
    temporary = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f"{folder.name}.lock"), announce):
            damage = find_damage(folder, hashes=hashes)
            if damage is None:
                yield None
                return
            if has_manifest(folder):
                console().print(f"  [yellow]the cache {folder} is damaged: {damage}; tokenizing again[/]")
            for left in [folder, *folder.parent.glob(f"{folder.name}.tmp-*")]:
                shutil.rmtree(left, ignore_errors=True)
            temporary.mkdir()
            try:
                yield temporary
                publish(temporary, folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise StorageError(
            f"preparing the data in {folder.parent} failed: {error}.\n"
            "Free some space there, or set another location: SFT_PLAY_CACHE=<folder>"
        ) from error


@contextlib.contextmanager
def _locked(path: Path, announce: bool) -> Iterator[None]:
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=1)
    except filelock.Timeout:
        if announce:
            console().print("Another process is preparing the same data; waiting for it.")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def finish(folder: Path, meta: dict[str, Any]) -> None:
    """Writes the manifest, with `meta` in it, which marks the folder as complete.

    Nothing is flushed to the disk: what a power failure damages is noticed and made again.
    """
    write_manifest(folder, meta, hash_files(folder, files_in(folder)))


def read_meta(folder: Path) -> dict[str, Any]:
    """What `finish` wrote."""
    return read_manifest(folder)


def row_digests(folder: Path, splits: Sequence[str]) -> dict[str, str]:
    """Split -> hash of its tokenized rows, for those that exist."""
    files = read_manifest(folder).get("files", {})
    names = {split: f"{split}.arrow" for split in splits}
    return {split: content_key(files[name]) for split, name in names.items() if name in files}


def token_lists(values: np.ndarray, lengths: np.ndarray) -> pa.Array:
    """A column of token lists from concatenated `values`, [total tokens], and `lengths`, [rows]; no copy."""
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(values, pa.int32()))


def batches(file: Path) -> Iterator[pa.RecordBatch]:
    """The record batches of an Arrow file, one at a time in memory."""
    with pa.OSFile(str(file), "rb") as opened:
        yield from pa.ipc.open_stream(opened)


def column_of(dataset: "datasets.Dataset", name: str) -> np.ndarray:
    """A column of numbers as an array, [rows], without a Python object for each."""
    return dataset.select_columns([name]).with_format("arrow")[:][name].to_numpy()


def count_supervised(dataset: "datasets.Dataset") -> np.ndarray:
    """Supervised tokens of each row, [rows]; reads a part of the rows at a time."""
    labels = dataset.select_columns(["labels"]).with_format("arrow")
    counts = [np.zeros(0, np.int64)]
    for part in labels.iter(batch_size=BATCH_ROWS):
        lists = part["labels"].combine_chunks()
        learned = np.concatenate([[0], np.cumsum(lists.flatten().to_numpy() != IGNORED)])
        counts.append(np.diff(learned[np.cumsum([0, *lists.value_lengths().to_pylist()])]))
    return np.concatenate(counts)


def open_rows(file: Path) -> "datasets.Dataset | None":
    """Tokenized rows as a memory-mapped dataset; None if the file does not exist."""
    if not file.exists():
        return None
    import datasets

    return datasets.Dataset.from_file(str(file))
