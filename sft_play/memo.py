"""Keeps on disk what takes seconds to find out, under a hash of all that it depends on.

A key holds the question and what it is asked about, and beside these this package's own code, Python, and the
name and version of every package that is installed: whatever library an answer comes from, another version of
it is asked again.
"""

import contextlib
import hashlib
import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

from sft_play.fingerprints import PACKAGE, sources_digest
from sft_play.runlog import cache_dir


def recall(question: str, *about: Any) -> Any:
    """The JSON value that is kept for a question; None if there is none, or it is damaged.

    Args:
        question: what is asked.
        about: everything that the answer depends on; `repr` tells one from another.
    """
    try:
        digest, _, text = _file(question, about).read_text(encoding="utf-8").partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    return json.loads(text) if digest == _hash(text) else None


def remember(value: Any, question: str, *about: Any) -> None:
    """Keeps a JSON value for `recall`; if it cannot be written, the question is asked again the next time."""
    path, text = _file(question, about), json.dumps(value)
    temporary = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(f"{_hash(text)}\n{text}", encoding="utf-8")
        temporary.replace(path)


def _file(question: str, about: tuple[Any, ...]) -> Path:
    key = _hash(repr((question, about, _own_code(), sys.version, installed_packages())))
    return cache_dir() / "answers" / f"{key[:32]}.json"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _own_code() -> str:
    """A digest of all modules of this package."""
    return sources_digest(PACKAGE, *sorted(path for path in PACKAGE.iterdir() if path.is_dir()))


@cache
def installed_packages() -> tuple[str, ...]:
    """Names and versions of all packages, from the names of their folders, which takes a millisecond."""
    found = {info.name for entry in sys.path for info in Path(entry).glob("*.*-info")}
    return tuple(sorted(found))
