"""Whether a base model is as it was published on the Hub, and still the one that a run began with.

The Hub's cache names each file by a hash that the Hub gave out: large files by their SHA-256, small ones by
git's SHA-1. In a folder that `hf download --local-dir` made, a file beside each of the weights has it; other
folders have no such hashes, so damage from before the first use is not noticed. A file is hashed once; later,
only its size, time and place on the disk are compared with what was remembered, as git does.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.cache import entry, read_value, write_value
from sft_play.config.schema import ModelConfig
from sft_play.errors import ConfigError
from sft_play.manifest import MAX_THREADS, Entries, hash_files
from sft_play.model.files import weight_files
from sft_play.runlog import RunDir, read_json
from sft_play.ui.console import console
from sft_play.units import format_bytes

USED = (".safetensors", ".json", ".model", ".txt", ".jinja")  # endings of the names of files that are loaded
SAID_FROM_BYTES = 2**30  # hashing less takes about a second


def _kept(kind: str, file: Path, *about: Any) -> Path:
    """Where is kept what is known about a file; another place once somebody has written to the file."""
    status = file.stat()
    place = str(file.resolve()), status.st_size, status.st_mtime_ns, status.st_ino
    return entry(kind, *place, *about)


def _say_what_takes_long(doing: str, files: Sequence[Path], after: str) -> None:
    size = sum(file.stat().st_size for file in files)
    if size >= SAID_FROM_BYTES:
        console().print(f"  {doing} {format_bytes(size)} of {after}, once")


@dataclass(frozen=True)
class _Published:
    """A file with the hash that it was published with."""

    name: str
    path: Path
    hash: str
    where: str  # for people
    remedy: str


def require_as_published(model: ModelConfig) -> None:
    """Raises a ConfigError if a file of a model, in the cache or a folder, is not as it was published.

    What is still to be downloaded is not asked for.
    """
    published = _downloaded(Path(model.name)) if Path(model.name).is_dir() else _blobs(model)
    kept = {_kept("hub-files", one.path, one.hash): one for one in published}
    left = {path: one for path, one in kept.items() if not read_value(path)}
    if not left:
        return
    files = [one.path for one in left.values()]
    _say_what_takes_long("comparing", files, f"{model.name} with the Hub's hashes")
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        same = list(pool.map(_is_as_published, left.values()))
    for one, whole in zip(left.values(), same, strict=True):
        if not whole:
            raise ConfigError(
                f"model.name: {one.name} of '{model.name}' is damaged{one.where}: it has another hash than "
                f"the one published on the Hub. {one.remedy}"
            )
    for path in left:
        write_value(path, True)


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


def _is_as_published(one: _Published) -> bool:
    """Whether the content of a file has its hash."""
    from huggingface_hub.utils.sha import git_hash

    with one.path.open("rb") as file:
        if len(one.hash) == 40:  # git's, of a small file
            return git_hash(file.read()) == one.hash
        return hashlib.file_digest(file, "sha256").hexdigest() == one.hash


def base_files(model: ModelConfig) -> Entries:
    """Sizes and hashes of the weights and of config.json in a model's folder; {} for a model of the Hub."""
    folder = Path(model.name)
    if not folder.is_dir():
        return {}
    names = [name for name in (*weight_files(folder), "config.json") if (folder / name).is_file()]
    kept = {name: _kept("base-files", folder / name) for name in names}
    found: Entries = {name: known for name, path in kept.items() if (known := read_value(path))}
    left = [name for name in names if name not in found]
    _say_what_takes_long("hashing", [folder / name for name in left], str(folder))
    hashed = hash_files(folder, left)
    for name, value in hashed.items():
        write_value(kept[name], value)
    return found | hashed


def keep_base_files(model: ModelConfig, run: RunDir) -> None:
    """Writes into the run directory what the base model is that the run begins with."""
    run.write_json(run.base, {"files": base_files(model)})


def require_same_base(model: ModelConfig, run: RunDir) -> None:
    """Raises a ConfigError if a file of the base model is not the one that the run began with, if known."""
    began = read_json(run.base).get("files")
    if not began or not Path(model.name).is_dir():
        return
    now = base_files(model)
    changed = [name for name in began if now.get(name) != began[name]]
    if not changed:
        return
    what = "is not the one" if changed[0] in now else "is missing; it was there"
    raise ConfigError(
        f"model.name: {changed[0]} in {model.name} {what} that {run.path.name} was trained with: damaged, or "
        f"replaced by another. Copy it again; if the change is meant, remove {run.base}"
    )
