"""Checks a base model from the Hub against the hashes it was published with.

The Hub's cache names each file by a hash that the Hub gave out: large files by their SHA-256, small ones by
git's SHA-1. In a folder that `hf download --local-dir` made, a file beside each of the weights has it. A file
is hashed once; later, only its size, time and place on the disk are compared with what was remembered, as git
does.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
    """Checks what the cache or a folder has of a model; what is still to be downloaded is not asked for.

    Raises:
        ConfigError: a file is not as it was published; names it.
    """
    published = _downloaded(Path(model.name)) if Path(model.name).is_dir() else _blobs(model)
    found = [one for one in published if not read_value(_checked(one))]
    if not found:
        return
    size = sum(one.path.stat().st_size for one in found)
    if size >= SAID_FROM_BYTES:
        console().print(f"  comparing {format_bytes(size)} of {model.name} with the Hub's hashes, once")
    entries = [_checked(one) for one in found]  # before they are read
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        same = list(pool.map(_is_as_published, found))
    if not all(same):
        one = found[same.index(False)]
        raise ConfigError(
            f"model.name: {one.name} of '{model.name}' is damaged{one.where}: it has another hash than "
            f"the one published on the Hub. {one.remedy}"
        )
    for path in entries:
        write_value(path, True)


@dataclass(frozen=True)
class _Published:
    """A file with the hash that it was published with."""

    name: str
    path: Path
    hash: str
    where: str
    """For people."""
    remedy: str


def _downloaded(folder: Path) -> Iterator[_Published]:
    """The weights in a folder of which huggingface_hub has noted commit, hash and time, a line each."""
    for path in sorted(folder.glob("*.safetensors")):
        note = folder / ".cache" / "huggingface" / "download" / f"{path.name}.metadata"
        lines = note.read_text(encoding="utf-8", errors="replace").split() if note.is_file() else []
        if len(lines) > 1 and _is_hash(lines[1]):
            remedy = f"Download it again; if you changed it yourself, remove {note}"
            yield _Published(path.name, path, lines[1], "", remedy)


def _blobs(model: ModelConfig) -> Iterator[_Published]:
    """A cached model's files, where what they link to is named by a hash."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model.name, "config.json", revision=model.revision)
    if not isinstance(config, str):
        return
    snapshot = Path(config).parent
    for path in sorted(snapshot.rglob("*")):
        blob = path.resolve()
        if path.suffix in USED and path.is_symlink() and blob.is_file() and _is_hash(blob.name):
            name = path.relative_to(snapshot).as_posix()
            remedy = f"Download it again: rm {blob} && hf download {model.name} {name}"
            yield _Published(name, blob, blob.name, " in the cache", remedy)


def _is_hash(name: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", name) is not None


def _checked(one: _Published) -> Path:
    """Where it is kept that a file is as published; another place once somebody has written to the file."""
    status = one.path.stat()
    about = str(one.path), one.hash, status.st_size, status.st_mtime_ns, status.st_ino
    return entry("hub-files", *about)


def _is_as_published(one: _Published) -> bool:
    """Whether the content of a file has its hash."""
    git = len(one.hash) == 40
    digest = hashlib.sha1(usedforsecurity=False) if git else hashlib.sha256()
    if git:
        digest.update(f"blob {one.path.stat().st_size}\0".encode())
    with one.path.open("rb") as file:
        while data := file.read(READ_BYTES):
            digest.update(data)
    return digest.hexdigest() == one.hash
