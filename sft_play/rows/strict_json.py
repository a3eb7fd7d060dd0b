"""JSON of users, in files and in strings, strictly: what two readers could take differently is an error."""

import json
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 100  # lists and objects inside each other; deeper rows cannot be written or rendered later


def parse(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is no JSON; NaN, Infinity, a number beyond 64 bits, a key that an object has twice, and
            more than MAX_DEPTH levels are none either.
    """
    try:
        return require_shallow(_STRICT.decode(text), text)
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep") from None


def decoder(constant: Callable[[str], None]) -> json.JSONDecoder:
    """A decoder that is as strict, but has `constant` say what NaN, Infinity and -Infinity are."""
    return json.JSONDecoder(object_pairs_hook=_unique_keys, parse_float=_finite, parse_constant=constant)


def require_shallow(value: object, text: str) -> Any:
    """The value of a JSON `text`; raises a ValueError if it is nested more than MAX_DEPTH levels deep."""
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deep(value):
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    return value


def without_nulls(value: object) -> Any:
    """The value without keys that are null, at any depth.

    Columns of files such as Parquet give an object all keys that it has in any row, so there a null cannot be
    told from a key that is not there; what is read from rows of JSON must be the same.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _is_deep(value: object) -> bool:
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


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    data = dict(pairs)
    if len(data) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        repeated = counts.most_common(1)[0][0]
        raise ValueError(f"duplicate key {repeated!r} in one object; keep one")
    return data


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is beyond the numbers of 64 bits")
    return value


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not allowed in JSON; write null, or leave the key out")


_STRICT = decoder(_refuse)
