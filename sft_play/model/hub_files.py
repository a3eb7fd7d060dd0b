"""Checks a base model from the Hub, in huggingface_hub's cache, against the hashes it was published with.

The cache names each file by a hash that the Hub gave out: large files by their SHA-256, small ones by git's
SHA-1. A file is hashed once; later, only its size, time and place on the disk are compared with what was
remembered, as git does.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sft_play.cache import entry, read_value, write_value
from sft_play.config.schema import ModelConfig
from sft_play.errors import ConfigError
from sft_play.runlog import console
from sft_play.units import format_bytes

USED = (".safetensors", ".json", ".model", ".txt", ".jinja")  # endings of the names of files that are loaded
READ_BYTES = 2**20
SAID_FROM_BYTES = 2**30  # hashing less takes about a second
MAX_THREADS = 16


def require_as_published(model: ModelConfig) -> None:
    """Checks what the cache has of a model; what is still to be downloaded is not asked for.

    Raises:
        ConfigError: a file is not as it was published; names it.
    """
    found = {name: blob for name, blob in _blobs(model) if not read_value(_checked(blob))}
    if not found:
        return
    size = sum(blob.stat().st_size for blob in found.values())
    if size >= SAID_FROM_BYTES:
        console().print(f"  comparing {format_bytes(size)} of {model.name} with the Hub's hashes, once")
    entries = [_checked(blob) for blob in found.values()]  # before they are read
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        same = dict(zip(found, pool.map(_is_as_named, found.values()), strict=True))
    damaged = next((name for name in found if not same[name]), None)
    if damaged:
        raise ConfigError(
            f"model.name: {damaged} of '{model.name}' is damaged in the cache: it has another hash than "
            "the one published on the Hub. Download it again: "
            f"rm {found[damaged].resolve()} && hf download {model.name} {damaged}"
        )
    for path in entries:
        write_value(path, True)


def _blobs(model: ModelConfig) -> Iterator[tuple[str, Path]]:
    """Names of a cached model's files, and what they link to, where that is named by a hash."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model.name, "config.json", revision=model.revision)
    if not isinstance(config, str):
        return
    snapshot = Path(config).parent
    for path in sorted(snapshot.rglob("*")):
        blob = path.resolve()
        if path.suffix in USED and path.is_symlink() and blob.is_file() and _is_hash(blob.name):
            yield path.relative_to(snapshot).as_posix(), blob


def _is_hash(name: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", name) is not None


def _checked(blob: Path) -> Path:
    """Where it is kept that a file is as published; another place once somebody has written to the file."""
    status = blob.stat()
    return entry("hub-files", str(blob), status.st_size, status.st_mtime_ns, status.st_ino)


def _is_as_named(blob: Path) -> bool:
    """Whether the content of a file has the hash that is its name."""
    git = len(blob.name) == 40
    digest = hashlib.sha1(usedforsecurity=False) if git else hashlib.sha256()
    if git:
        digest.update(f"blob {blob.stat().st_size}\0".encode())
    with blob.open("rb") as file:
        while data := file.read(READ_BYTES):
            digest.update(data)
    return digest.hexdigest() == blob.name
