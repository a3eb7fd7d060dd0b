"""Files that one worker takes one after the other, since each worker would make anew what they start from."""

import re
from functools import cache
from typing import Any

import pytest

from tests.conftest import REPOSITORY

# By a name, what the text of such a file has: each takes 10 s or more to make, most of it imports.
TOGETHER = {
    "the finished run": r"^def \w+\([^)]*\bfinished\b|getfixturevalue\(.finished.\)",
    "a process that has imported all": r"\bforked(: bool)? ?= ?True\b",
}
OWN = r"^def finished\(|^from .* import .*\bfinished\b"  # another one, of a unit test


@cache
def together(file: str) -> str:
    """What this file shares with others; the file itself if nothing."""
    text = (REPOSITORY / file).read_text()
    shared = [name for name, shown in TOGETHER.items() if re.search(shown, text, re.MULTILINE)]
    return shared[0] if shared and not re.search(OWN, text, re.MULTILINE) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """That of `--dist loadfile`, whose files are those that `together` joins."""
    from xdist.scheduler import LoadFileScheduling

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return together(super()._split_scope(nodeid))

    return Together(config, log) if config.getvalue("dist") == "loadfile" else None
