"""Reads back the values and origins of a config.resolved.yaml, also if it no longer is a valid config."""

import json
import re
from dataclasses import dataclass
from typing import Any

LINE = re.compile(r"^(?P<indent> *)(?P<key>\w+):(?: (?P<rest>.+))?$")


@dataclass(frozen=True)
class Setting:
    """A value of a config, and where it came from."""

    value: Any
    origin: str  # "default", "override", or a file


def read_resolved(text: str) -> dict[str, Setting]:
    """The settings that `dump_resolved` wrote, by dotted name; lines that it cannot have written are skipped.

    A run of an earlier version may have settings that the schema does not know any more.
    """
    settings: dict[str, Setting] = {}
    sections: list[str] = []
    for line in text.splitlines():
        found = LINE.match(line)
        if not found:
            continue
        del sections[len(found["indent"]) // 2 :]
        if found["rest"] is None:
            sections.append(found["key"])
        elif setting := _setting(found["rest"]):
            settings[".".join([*sections, found["key"]])] = setting
    return settings


def _setting(text: str) -> Setting | None:
    """The setting of `value  # origin`; None if the value is not JSON."""
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None
    return Setting(value, text[end:].strip().removeprefix("# "))
