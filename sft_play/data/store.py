"""Tokenised data on disk: Arrow files in a folder that is named after everything its content depends on."""

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

from sft_play.errors import StorageError
from sft_play.runlog import console

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

META = "meta.json"
TOKEN_LIST = pa.list_(pa.int32())
ROWS = pa.schema({"input_ids": TOKEN_LIST, "labels": TOKEN_LIST, "length": pa.int32()})


def tokenizer_digest(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Of all that decides which tokens a text becomes: vocabulary, merges, added and special tokens, chat template."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_padding()  # left over from an earlier call, and of no effect here
    backend.no_truncation()
    parts = [backend.to_str(), json.dumps(tokenizer.special_tokens_map), json.dumps(tokenizer.chat_template)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def content_key(parts: dict[str, Any]) -> str:
    """A folder name for these ingredients."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def is_complete(folder: Path) -> bool:
    """Whether the folder was written to its end and its files still have their sizes."""
    try:
        sizes = json.loads((folder / META).read_text(encoding="utf-8"))["sizes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


@contextlib.contextmanager
def building(folder: Path, *, tell: bool) -> Iterator[Path | None]:
    """Gives a temporary folder to fill, which becomes `folder` at the end; None if `folder` is complete.

    One process of this machine works, the others wait for its result. A folder left by a killed process is removed.

    Raises:
        StorageError: the cache cannot be written.
    """
    temporary = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f"{folder.name}.lock"), tell):
            if is_complete(folder):
                yield None
                return
            for left in [folder, *folder.parent.glob(f"{folder.name}.tmp-*")]:
                shutil.rmtree(left, ignore_errors=True)
            temporary.mkdir()
            try:
                yield temporary
                temporary.rename(folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise StorageError(
            f"preparing the data in {folder.parent} failed: {error}.\n"
            "Free space there, or choose another place: SFT_PLAY_CACHE=<folder>"
        ) from error


@contextlib.contextmanager
def _locked(path: Path, tell: bool) -> Iterator[None]:
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=1)
    except filelock.Timeout:
        if tell:
            console().print("Another process is preparing the same data; waiting for it.")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def finish(folder: Path, meta: dict[str, Any]) -> None:
    """Writes the facts about the files of a folder; the last thing before it is renamed."""
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    (folder / META).write_text(json.dumps({**meta, "sizes": sizes}, indent=1), encoding="utf-8")


def read_meta(folder: Path) -> dict[str, Any]:
    """What `finish` wrote."""
    return json.loads((folder / META).read_text(encoding="utf-8"))


def token_lists(values: np.ndarray, lengths: np.ndarray) -> pa.Array:
    """A column of token lists from all tokens one after the other, without a copy."""
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(values, pa.int32()))


def batches(file: Path) -> Iterator[pa.RecordBatch]:
    """The record batches of an Arrow file, memory-mapped."""
    with pa.memory_map(str(file)) as mapped:
        yield from pa.ipc.open_stream(mapped)


def write_strings(file: Path, values: Sequence[str]) -> None:
    """A file with one column of texts."""
    batch = pa.record_batch({"value": pa.array(values, pa.large_string())})
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)


def open_rows(file: Path) -> "datasets.Dataset | None":
    """Token rows as a memory-mapped data set; None if there is no such file."""
    if not file.exists():
        return None
    import datasets

    return datasets.Dataset.from_file(str(file))
