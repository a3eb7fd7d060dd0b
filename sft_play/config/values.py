"""Types of values in a config, with their limits and what is said of others."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, FiniteFloat

from sft_play.choices.metrics import METRICS

LONGEST_NAME = 255  # bytes of the name of a file
SHOWN = 60  # characters of a word in a message
OWN_METRIC = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # module:function


def _reject_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("expected a number, not true/false")
    return value


def _reject_bool_or_auto(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("expected a number or 'auto', not true/false")
    return value


Auto = Literal["auto"]
# Of every setting that is a number; after its limits, which the JSON schema would not have otherwise.
NUMBER = BeforeValidator(_reject_bool)
Count = Annotated[int, Field(gt=0, lt=2**31), NUMBER]
Tiles = Annotated[int, Field(gt=0, le=64), NUMBER]  # each is traced
Workers = Annotated[int, Field(gt=0, le=1024), NUMBER]
PositiveFloat = Annotated[FiniteFloat, Field(gt=0), NUMBER]
Fraction = Annotated[FiniteFloat, Field(ge=0, lt=1), NUMBER]


def _positive(value: object) -> object:
    if isinstance(value, (int, float)) and not value > 0:
        raise ValueError("expected a positive number or 'auto'")
    return value


def _yes_or_no(value: object) -> object:
    return {True: "yes", False: "no"}.get(value, value) if isinstance(value, bool) else value


def _regular_expression(value: str) -> str:
    import regex  # has a time limit for a search, which re has not

    try:
        regex.compile(value)
    except (regex.error, OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return value


def modules_of(pattern: str) -> re.Pattern[str]:
    """The expression by which PEFT finds the modules of a key of rank_pattern (its get_pattern_key)."""
    return re.compile(rf"(.*\.)?({pattern})$")


def _module_name(value: str) -> str:
    try:
        re.compile(value)
        modules_of(value)  # where a flag such as (?i) is not at the start
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{value!r} is not a regular expression: {error}") from None
    return value


def _distinct_words(values: tuple[str, ...]) -> tuple[str, ...]:
    blank = next((value for value in values if not value.strip()), None)
    if blank is not None:
        raise ValueError(f"{blank[:SHOWN]!r} is empty or only whitespace; remove it")
    twice = next((value for value in values if values.count(value) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice[:SHOWN]!r} is listed twice; list it once")
    return values


def _metrics(values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if value not in METRICS and not OWN_METRIC.fullmatch(value):
            raise ValueError(
                f"{value[:SHOWN]!r} is not a metric; expected {', '.join(METRICS)}, or a function of "
                "yours as module:function"
            )
    names = [value.rpartition(":")[2] for value in values]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ValueError(f"two metrics are called {twice}; rename your function")
    if not values:
        raise ValueError("expected at least one metric; eval.generate=false does without answers")
    return values


def _usable_path(value: str) -> str:
    longest = max(len(part.encode()) for part in value.split("/"))
    if "\0" in value or longest > LONGEST_NAME:
        raise ValueError(f"not a usable path: a name in it has more than {LONGEST_NAME} bytes or a NUL byte")
    return value


PathText = Annotated[str, AfterValidator(_usable_path)]
Expression = Annotated[str, AfterValidator(_regular_expression)]
ModuleName = Annotated[str, AfterValidator(_module_name)]
Words = Annotated[tuple[str, ...], AfterValidator(_distinct_words)]
Metrics = Annotated[Words, AfterValidator(_metrics)]
AutoOrCount = Annotated[Count | Auto, BeforeValidator(_reject_bool_or_auto)]
AutoOrAmount = Annotated[
    PositiveFloat | Auto, BeforeValidator(_positive), BeforeValidator(_reject_bool_or_auto)
]
AutoOrTiles = Annotated[Tiles | Auto, BeforeValidator(_reject_bool_or_auto)]
AutoOrWorkers = Annotated[Workers | Auto, BeforeValidator(_reject_bool_or_auto)]
Precision = Annotated[Literal["auto", "bf16", "fp16", "no"], BeforeValidator(_yes_or_no)]
