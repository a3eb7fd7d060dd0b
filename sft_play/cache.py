"""The cache: what takes long to find out, on disk under a digest of all that it depends on.

    <cache>/<kind>/<digest>   the SHA-256 of the content, a line break, and the content: JSON or other bytes

What is missing, damaged or not from here reads as absent, and what cannot be written is not kept: it is found
out again, and nothing fails because of it.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sft_play.files import write_atomic
from sft_play.fingerprints import answering_packages, own_code


def cache_dir() -> Path:
    """The folder of tokenized data, built-in models and everything else that is kept between commands.

    SFT_PLAY_CACHE, or `.cache/sft-play` in the current folder.
    """
    return Path(os.environ.get("SFT_PLAY_CACHE") or Path(".cache") / "sft-play").absolute()


def entry(kind: str, *about: object, within: Path | None = None) -> Path:
    """Where something is kept, `within` a folder (default: `cache_dir()`).

    `about` is all that it depends on; `repr` tells one from another.
    """
    return (within or cache_dir()) / kind / _digest(repr(about).encode())[:32]


def read_bytes(path: Path) -> bytes | None:
    """What `write_bytes` wrote; None if it is absent."""
    try:
        digest, _, content = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    return content if digest.decode(errors="replace") == _digest(content) else None


def write_bytes(path: Path, content: bytes) -> None:
    """Keeps bytes at a path that `entry` gave, or in a folder there."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # not flushed: what a power failure takes reads as absent
        write_atomic(path, f"{_digest(content)}\n".encode() + content, flush=False)


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


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
