"""Reads back the values and origins of a config.resolved.yaml, also if it no longer is a valid config."""

import contextlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.files import read_whole

LONGEST = 2**20  # bytes
LINE = re.compile(r"^(?P<indent> *)(?P<key>\w+):(?: (?P<rest>.+))?$", re.MULTILINE)


@dataclass(frozen=True)
class Setting:
    """A value of a config, and where it came from."""

    value: Any
    origin: str  # "default", "override", or a file


def read_resolved(path: Path) -> dict[str, Setting]:
    """The settings of a file that `dump_resolved` wrote, by dotted name; other lines in it are skipped.

    A run of an earlier version may have settings that the schema does not know any more.
    """
    try:
        text = read_whole(path, LONGEST).decode(errors="replace")
    except OSError:
        return {}
    settings: dict[str, Setting] = {}
    sections: list[str] = []
    for found in LINE.finditer(text):
        del sections[len(found["indent"]) // 2 :]
        if found["rest"] is None:
            sections.append(found["key"])
            continue
        with contextlib.suppress(ValueError, RecursionError):  # the value is not JSON
            value, end = json.JSONDecoder().raw_decode(found["rest"])
            origin = found["rest"][end:].strip().removeprefix("# ")
            settings[".".join([*sections, found["key"]])] = Setting(value, origin)
    return settings
