"""Refuses rows that are nested too deeply to be written, hashed or rendered later."""

from typing import Any

MAX_DEPTH = 100  # lists and objects inside each other


def require_shallow(value: Any, text: str) -> Any:
    """The value that was decoded from a JSON `text`.

    Raises:
        ValueError: it is nested more than MAX_DEPTH levels deep.
    """
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deep(value):
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    return value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        level = inner
    return any(isinstance(item, (dict, list)) for item in level)
