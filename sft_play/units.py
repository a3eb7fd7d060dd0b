"""Bytes, counts and durations: integers internally, formatted only for display.

1 GiB is 2**30 bytes and is always labeled GiB; GB (10**9) is not used.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

KIB, MIB, GIB = 2**10, 2**20, 2**30
UNITS = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))

BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "int8": 1}
SHORT_NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}  # in files of weights
AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}  # train.mixed_precision -> the type it computes in
SIXTEEN_BIT = tuple(AUTOCAST.values())


def format_bytes(count: int) -> str:
    """`format_bytes(5 * GIB)` is "5.00 GiB"; the unit is the largest one that gives at least 1."""
    for unit, name in UNITS:
        if abs(count) >= unit:
            return f"{count / unit:,.2f} {name}"
    return f"{count} B"


def format_count(number: float) -> str:
    """`format_count(8_030_000_000)` is "8.03B"."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(number) >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:g}"


def counted(count: int, noun: str) -> str:
    """`counted(1, "row")` is "1 row", `counted(2000, "process")` is "2,000 processes"."""
    return f"{count:,} {noun if count == 1 else plural(noun)}"


def tallied(names: Iterable[str]) -> str:
    """`tallied(["L4", "T4", "L4"])` is "2 x L4, 1 x T4"."""
    return ", ".join(f"{count} x {name}" for name, count in Counter(names).items())


def plural(noun: str) -> str:
    """`plural("process")` is "processes"."""
    return noun + ("es" if noun.endswith("s") else "s")


def capitalized(text: str) -> str:
    """`capitalized("full fine-tuning of Qwen3")` is "Full fine-tuning of Qwen3"."""
    return text[:1].upper() + text[1:]


def listed(names: Sequence[str], most: int) -> str:
    """At most so many of the names, and how many more there are: "a, b and 3 more"."""
    left = len(names) - most
    return ", ".join(names[:most]) + (f" and {left} more" if left > 0 else "")


def alternatives(names: Sequence[str]) -> str:
    """`alternatives(["full", "lora", "qlora"])` is "full, lora or qlora"."""
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def format_duration(seconds: float) -> str:
    """`format_duration(4000)` is "1 h 06 min"; below a second it is in ms, from 100 hours in days."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 100:
        return f"{hours} h {minutes:02d} min"
    return f"{seconds / 86_400:,.1f} days"


def format_range(least: float, most: float, form: Callable[[float], str]) -> str:
    """`format_range(2, 3, format_duration)` is "2.0 s to 3.0 s"; one text where both are alike."""
    low, high = form(least), form(most)
    return low if low == high else f"{low} to {high}"
