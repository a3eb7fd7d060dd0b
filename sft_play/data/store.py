"""The on-disk cache: Arrow files in a folder whose name is a hash of everything the content depends on."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock
import numpy as np
import pyarrow as pa

from sft_play.errors import StorageError
from sft_play.files import publish
from sft_play.manifest import files_in, find_damage, has_manifest, hash_files, write_manifest
from sft_play.parts import IGNORED
from sft_play.ui.console import console, warn
from sft_play.vision.types import FOLDER, PICTURES

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

BATCH_TOKENS = 1 << 20  # read at a time
NO_TOKENS = np.zeros(0, np.int32)
TOKEN_LIST = pa.list_(pa.int32())
TEXT_ROWS = pa.schema({"input_ids": TOKEN_LIST, "labels": TOKEN_LIST, "length": pa.int32()})
ROWS = TEXT_ROWS.append(pa.field("pictures", PICTURES))


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


def build(
    folder: Path, make: Callable[[Path], Mapping[str, object]], *, announce: bool = True, hashes: bool = True
) -> None:
    """Has `make` fill a temporary folder, which becomes `folder`, unless that is complete already.

    What `make` returns goes into the manifest, which marks the folder as complete. One process of this
    machine does the work while the others wait for the result; with `announce` they say so. A folder left by
    a killed process is removed, and so is a damaged one. Without `hashes`, only the sizes of its files are
    compared, not their content. Nothing is flushed: what a power failure damages is made again.

    Raises:
        StorageError: the cache cannot be written.
    """
    temporary = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    lock = filelock.FileLock(folder.with_name(f"{folder.name}.lock"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            held = lock.acquire(timeout=1)
        except filelock.Timeout:
            if announce:
                console().print("Another process is preparing the same data; waiting for it.")
            held = lock.acquire()
        with held:
            damage = find_damage(folder, hashes=hashes)
            if damage is None:
                return
            if has_manifest(folder):
                warn(f"the cache {folder} is damaged: {damage}; tokenizing again")
            for left in [folder, *folder.parent.glob(f"{folder.name}.tmp-*")]:
                shutil.rmtree(left, ignore_errors=True)
            temporary.mkdir()
            try:
                meta = make(temporary)
                # kept pictures have their hash in their names, and are checked as they are used
                files = [name for name in files_in(temporary) if not name.startswith(f"{FOLDER}/")]
                write_manifest(temporary, meta, hash_files(temporary, files))
                publish(temporary, folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        refused = error.errno in (errno.EROFS, errno.EACCES, errno.EPERM)
        raise StorageError(
            f"preparing the data in {folder.parent} failed: {error}.\n"
            f"{'Make it writable' if refused else 'Free some space there'}, or set another location: "
            "SFT_PLAY_CACHE=<folder>"
        ) from error


def token_lists(rows: Sequence[np.ndarray]) -> pa.Array:
    """A column of rows of int32 [tokens]; much faster than `pa.array`."""
    ends = np.cumsum([0, *map(len, rows)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(np.concatenate([NO_TOKENS, *rows])))


def batches(file: Path) -> Iterator[pa.RecordBatch]:
    """The record batches of an Arrow file, one at a time in memory."""
    with pa.OSFile(str(file), "rb") as opened:
        yield from pa.ipc.open_stream(opened)


@contextlib.contextmanager
def writing(file: Path, schema: pa.Schema) -> Iterator[pa.RecordBatchStreamWriter]:
    """Yields what writes record batches to an Arrow file."""
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        yield writer


def column_of(dataset: "datasets.Dataset", name: str) -> np.ndarray:
    """A column of numbers as an array, [rows], without a Python object for each."""
    return dataset.select_columns([name]).with_format("arrow")[:][name].to_numpy()


def count_supervised(dataset: "datasets.Dataset") -> np.ndarray:
    """Supervised tokens of each row, [rows]."""
    return supervised_spans(dataset)[:, 0]


def supervised_spans(dataset: "datasets.Dataset") -> np.ndarray:
    """Of each row, how many tokens are supervised, the first, and the one after the last, [rows, 3].

    Reads a part of the rows at a time.
    """
    labels = dataset.select_columns(["labels"]).with_format("arrow")
    ends = np.cumsum(column_of(dataset, "length"), dtype=np.int64)
    found, start = [np.zeros((0, 3), np.int64)], 0
    while start < len(ends):
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + BATCH_TOKENS, side="right")))
        flat = labels[start:stop]["labels"].combine_chunks().flatten().to_numpy()
        bounds = np.concatenate([[before], ends[start:stop]]) - before
        places = np.flatnonzero(flat != IGNORED)
        of_row = np.searchsorted(places, bounds)
        counts = np.diff(of_row)
        edges = np.append(places, 0)  # of a row without any, both are the first token
        first = np.where(counts, edges[of_row[:-1]] - bounds[:-1], 0)
        end = np.where(counts, edges[of_row[1:] - 1] + 1 - bounds[:-1], 0)
        found.append(np.stack([counts, first, end], axis=1))
        start = stop
    return np.concatenate(found)
