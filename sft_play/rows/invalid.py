"""What is wrong with a row, in a sentence; who reads the row puts file and line in front of it."""

import json

from sft_play.errors import kind_of


def found_text(value: object) -> str:
    """What a value is, in a few words for a message."""
    if value is None:
        return "missing or null"
    if isinstance(value, str) and not value.strip():
        return "an empty string"
    if value == []:
        return "an empty list"
    if isinstance(value, str):
        return f"{value[:40]!r}"
    text = json.dumps(value, default=str)
    if isinstance(value, list | dict):
        return f"{kind_of(value)} ({text[:40]})"
    return text[:60]


class InvalidRow(Exception):
    """What is wrong with a row."""


def invalid(key: str, value: object, allowed: str) -> InvalidRow:
    """The error that a key has another value than is allowed."""
    return InvalidRow(f"{key} is {found_text(value)}; expected {allowed}")
