"""Folders that are written whole or not at all, with a manifest by which damage is noticed before loading.

The manifest has the size and the SHA-256 of every file, and of itself. It guards against damage, not against
an attacker, who would write a manifest that matches.

A file is hashed in parts of 64 MiB, on all cores; a smaller one has the hash that `sha256sum` prints.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sft_play.files import flush_to_disk, publish, write_atomic

MANIFEST = "sft-play-manifest.json"
CARD = "README.md"  # people edit it, and its scores come after the weights
PART_BYTES = 64 * 2**20
READ_BYTES = 2**20
MAX_THREADS = 16

Entries = dict[str, dict[str, Any]]  # path within the folder -> {"bytes": size, "sha256": [of each part]}


def files_in(folder: Path) -> list[str]:
    """The paths of all files within the folder, also in folders below it, without manifest and model card."""
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in paths if path not in (MANIFEST, CARD))


def hash_files(folder: Path, names: Iterable[str], *, flush: bool = False) -> Entries:
    """Sizes and hashes of files in a folder; with `flush`, they are on the disk when it returns."""
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        found = []
        for name in names:
            size = (folder / name).stat().st_size
            starts = range(0, max(size, 1), PART_BYTES)
            found.append((name, size, [pool.submit(_hash_part, folder / name, start) for start in starts]))
        for name, _, _ in found if flush else ():
            flush_to_disk(folder / name)
        return {
            name: {"bytes": size, "sha256": [part.result() for part in parts]} for name, size, parts in found
        }


def _hash_part(path: Path, start: int) -> str:
    digest = hashlib.sha256()
    left = PART_BYTES
    with path.open("rb") as file:
        file.seek(start)
        while left and (data := file.read(min(READ_BYTES, left))):
            digest.update(data)
            left -= len(data)
    return digest.hexdigest()


def write_manifest(folder: Path, facts: Mapping[str, object], entries: Entries) -> None:
    """Writes the manifest of a folder whose files have been flushed, and flushes it and the folder.

    The manifest has the `entries` of `hash_files` and, beside them, the JSON values of `facts`.
    """
    tree = {**facts, "files": entries}
    tree["sha256"] = _digest_of(tree)
    write_atomic(folder / MANIFEST, json.dumps(tree, indent=1) + "\n")
    for below in {(folder / name).parent for name in entries} | {folder}:
        flush_to_disk(below)


def _digest_of(tree: Mapping[str, object]) -> str:
    content = {key: value for key, value in tree.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def has_manifest(folder: Path) -> bool:
    """Whether the folder has a manifest; earlier versions wrote none."""
    return (folder / MANIFEST).exists()


def read_manifest(folder: Path) -> dict[str, Any]:
    """What `write_manifest` wrote; {} if there is none or it is damaged."""
    try:
        tree = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return tree if tree["sha256"] == _digest_of(tree) else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def find_damage(
    folder: Path, only: Callable[[str], bool] = lambda name: True, *, hashes: bool = True
) -> str | None:
    """The first file that is not as it was written, and how; None if all are.

    Checks those files of the manifest that `only` picks; with `hashes` their content, else only their sizes.
    """
    manifest = read_manifest(folder)
    if not manifest:
        return f"{MANIFEST} is missing or damaged"
    listed = {name: entry for name, entry in manifest["files"].items() if only(name)}
    try:
        for name, entry in listed.items():
            path = folder / name
            if path.is_symlink() or not path.is_file():
                return f"{name} is {'a symbolic link' if path.is_symlink() else 'missing'}"
            size = path.stat().st_size
            if size != entry["bytes"]:
                return f"{name} has {size} bytes instead of {entry['bytes']}"
        found = hash_files(folder, listed) if hashes else listed
    except OSError as error:
        return f"a file cannot be read: {error.strerror or error}"
    changed = [name for name in listed if found[name]["sha256"] != listed[name]["sha256"]]
    return f"{changed[0]} has changed since it was written" if changed else None


@contextlib.contextmanager
def replacing(target: Path, facts: Mapping[str, object]) -> Iterator[Path]:
    """Yields an empty folder; once the block has filled it, it gets a manifest and replaces `target`.

    If the block fails or the process is killed, `target` stays as it was.
    """
    incomplete = target.with_name(f"{target.name}.sft-play-incomplete")
    earlier = target.with_name(f"{target.name}.sft-play-earlier")
    target.parent.mkdir(parents=True, exist_ok=True)
    if earlier.exists() and not target.exists():  # killed between the two renames below
        earlier.rename(target)
    for leftover in (incomplete, earlier):
        shutil.rmtree(leftover, ignore_errors=True)
    incomplete.mkdir()
    try:
        yield incomplete
        write_manifest(incomplete, facts, hash_files(incomplete, files_in(incomplete), flush=True))
        if target.exists():
            target.rename(earlier)
        publish(incomplete, target)
        shutil.rmtree(earlier, ignore_errors=True)
    finally:
        shutil.rmtree(incomplete, ignore_errors=True)
        if earlier.exists() and not target.exists():
            earlier.rename(target)
