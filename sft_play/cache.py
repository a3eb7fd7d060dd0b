"""The cache: what takes long to find out, on disk under a digest of all that it depends on.

    <cache>/<kind>/<digest>   the SHA-256 of the content, a line break, and the content: JSON or other bytes

What is missing, damaged or not from here reads as absent, and what cannot be written is not kept: it is found
out again, and nothing fails because of it. What was used longest ago makes room for what is new.
"""

import contextlib
import fcntl
import grp
import hashlib
import json
import os
import pwd
import re
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sft_play.files import write_atomic
from sft_play.fingerprints import answering_packages, own_code

LIMIT_BYTES = 2 * 2**30  # of all that is kept; a trace has a tenth to ten MiB
ENTRY = re.compile("[0-9a-f]{32}")  # names of what `entry` finds a place for
BUILT_KINDS = ("data", "builtin")
BUILT = re.compile(r"([\w-]+-)?[0-9a-f]{24}(\..+)?")  # of tokenized rows and built-in models (data/store.py)
DAY_S = 24 * 3600.0  # how often that is looked at, and how exactly it is known when something was used


def cache_dir() -> Path:
    """The folder of all that is the same in every project: traces, measurements, answers, built-in models.

    SFT_PLAY_CACHE, or the user's own: `sft-play` in XDG_CACHE_HOME, by default in ~/.cache.
    """
    if own := os.environ.get("SFT_PLAY_CACHE"):
        return Path(own).absolute()
    homes = os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")  # noqa: PTH111 - some have none
    home = next((home for home in homes if Path(home).is_absolute()), None)  # others do not count
    return Path(home) / "sft-play" if home else project_dir()


def project_dir() -> Path:
    """The folder of what belongs to a project: its tokenized rows, and the logs of commands.

    SFT_PLAY_CACHE, or `.cache/sft-play` in the current folder.
    """
    return Path(os.environ.get("SFT_PLAY_CACHE") or Path(".cache") / "sft-play").absolute()


def log_of(command: str) -> Path:
    """The log of a command: in the project, or in the user's own folder if the project is read-only."""
    for folder in (project_dir(), cache_dir()):
        log = folder / f"{command}.log"
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            log.touch(mode=0o600)
            return log
    return project_dir() / f"{command}.log"  # whose error says what to do


def entry(kind: str, *about: object, within: Path | None = None) -> Path:
    """Where something is kept, `within` a folder (default: `cache_dir()`).

    `about` is all that it depends on; `repr` tells one from another.
    """
    return (within or cache_dir()) / kind / _digest(repr(about).encode())[:32]


def private_entry(kind: str, *about: object) -> Path | None:
    """The folder of an entry, made if there is none; None if others can write there, or nobody can.

    For what is run when it is read. Who can write to a folder above it could put another one in its place.
    """
    folder = entry(kind, *about)
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder.resolve()
        if _is_private(path.stat(), {os.getuid()}) and all(
            _is_private(above.stat(), {os.getuid(), 0}) or above.stat().st_mode & stat.S_ISVTX
            for above in path.parents
        ):
            (folder / "used").touch()  # `_make_room` looks at the files
            return folder
    return None


@contextmanager
def written_to(folder: Path) -> Iterator[bool]:
    """In the block, a library writes to a folder; yields whether that was emptied first: a writer was killed.

    Who is killed may leave files cut off. A writer holds the lock of its mark, and takes the mark away as it
    ends. A folder to which another one writes stays as it is.
    """
    with contextlib.ExitStack() as stack:
        emptied = False
        with contextlib.suppress(OSError):  # some network disks have no locks
            with (folder.parent / ".lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if emptied := bool(marks := [*folder.glob("written-to-by-*")]) and all(map(_is_free, marks)):
                    shutil.rmtree(folder)
                    folder.mkdir(mode=0o700)
                mark = folder / f"written-to-by-{os.getpid()}"
                fcntl.flock(stack.enter_context(mark.open("a")), fcntl.LOCK_EX | fcntl.LOCK_NB)
                stack.callback(mark.unlink, missing_ok=True)
        yield emptied


def _is_free(path: Path) -> bool:
    """Whether no process holds the lock of a file."""
    try:
        with path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_private(found: os.stat_result, owners: set[int]) -> bool:
    """Whether none but these owners can write to a folder; a group that is named as its user is that user."""
    shared = stat.S_IWGRP | stat.S_IWOTH
    if found.st_gid == os.getgid():
        with contextlib.suppress(KeyError):  # no such name
            group, name = grp.getgrgid(found.st_gid), pwd.getpwuid(os.getuid()).pw_name
            if group.gr_name == name and set(group.gr_mem) <= {name}:
                shared = stat.S_IWOTH
    return found.st_uid in owners and not found.st_mode & shared


def read_bytes(path: Path) -> bytes | None:
    """What `write_bytes` wrote; None if it is absent."""
    try:
        digest, _, content = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > DAY_S:
            os.utime(path)  # used today
    return content if digest.decode(errors="replace") == _digest(content) else None


def write_bytes(path: Path, content: bytes) -> None:
    """Keeps bytes at a path that `entry` gave, or in a folder there."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # not flushed: what a power failure takes reads as absent
        write_atomic(path, f"{_digest(content)}\n".encode() + content, flush=False)
        _make_room(cache_dir())


def _make_room(folder: Path) -> None:
    """Once a day, removes the entries that were used longest ago, beyond the limit."""
    looked = folder / ".looked"
    with contextlib.suppress(OSError):
        if looked.exists() and time.time() - looked.stat().st_mtime < DAY_S:
            return
        looked.touch()
        kept = [path for path in folder.glob("*/*") if ENTRY.fullmatch(path.name) or _is_model(path)]
        found = [(path, _files(path)) for path in kept]
        size = sum(file.st_size for _, files in found for file in files)
        found.sort(key=lambda each: max(file.st_mtime for file in [each[0].stat(), *each[1]]))
        for path, files in found:
            if size <= LIMIT_BYTES:
                break
            _remove(path)
            size -= sum(file.st_size for file in files)


def clear(folder: Path) -> int:
    """Removes all that is kept in a folder, and nothing else that is there; returns its bytes."""
    found = [path for path in folder.glob("*/*") if ENTRY.fullmatch(path.name) or _is_built(path)]
    size = sum(file.st_size for path in found for file in _files(path))
    for path in found:
        _remove(path)
    for kind in {path.parent for path in found}:
        (kind / ".lock").unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # something else is there
            kind.rmdir()
    (folder / ".looked").unlink(missing_ok=True)
    return size


def _is_built(path: Path) -> bool:
    return path.parent.name in BUILT_KINDS and bool(BUILT.fullmatch(path.name))


def _is_model(path: Path) -> bool:
    return path.parent.name == "builtin" and _is_built(path) and path.is_dir()


def _files(path: Path) -> list[os.stat_result]:
    return [file.stat() for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def read_value(path: Path) -> Any:
    """The JSON value that `write_value` wrote; None if it is absent."""
    content = read_bytes(path)
    return None if content is None else json.loads(content)


def write_value(path: Path, value: object) -> None:
    """Keeps a JSON value at a path that `entry` gave."""
    write_bytes(path, json.dumps(value).encode())


def update_value(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Keeps what `change` makes of the JSON object that is there, {} if it is absent.

    Other processes that do the same wait meanwhile, so that no update is lost.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # some network disks have no locks
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((path.parent / ".lock").open("a"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        write_value(path, change(read_value(path) or {}))


def recall(question: str, *about: object) -> Any:
    """The answer that is kept for a question, a JSON value; None if it is absent.

    `about` is all that the answer depends on, besides our own code, Python and the libraries that
    give such answers: another version of one of them is asked again.
    """
    return read_value(_answer(question, about))


def remember(value: object, question: str, *about: object) -> None:
    """Keeps a JSON value for `recall`."""
    write_value(_answer(question, about), value)


def _answer(question: str, about: tuple[Any, ...]) -> Path:
    return entry("answers", question, about, own_code(), sys.version, answering_packages())


def state_of(*kinds: str) -> str:
    """A digest of all that is kept of these kinds, another one once something was added or renewed."""
    found = sorted(path for kind in kinds for path in (cache_dir() / kind).glob("*"))
    return _digest(repr([(path.name, read_bytes(path)) for path in found]).encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
