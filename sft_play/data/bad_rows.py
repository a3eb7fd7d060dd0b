"""Rows that are not valid: all of them are found, then refused together, or left out and listed in a file."""

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import NoReturn

from sft_play.data.stats import SplitsStats, splits_of
from sft_play.errors import DataError
from sft_play.spelling import var
from sft_play.units import counted

FILE = "bad_rows.txt"  # a line for each, beside the tokenized rows
DROPPED = "not valid"
SHOWN = 20


def keep(folder: Path, problems: Sequence[str]) -> None:
    """Adds what is wrong with rows to the file, a line each."""
    if problems:
        with (folder / FILE).open("a", encoding="utf-8") as file:
            file.writelines(" ".join(problem.split("\n")) + "\n" for problem in problems)


def refuse(folder: Path, what: str, bad: int, read: int) -> NoReturn:
    """Raises a DataError that lists the rows of `what` that are not valid, of so many that were read."""
    with (folder / FILE).open(encoding="utf-8") as file:
        lines = "".join(f"  {line}\n" for line in by_cause(islice(file, SHOWN)))
    first = f"; the first {SHOWN}" if bad > SHOWN else ""
    them, said = ("it", "is not valid") if bad == 1 else ("them", "are not valid")
    dropping = f", or leave {them} out: {var(ARGS='data.bad_rows=drop')}"
    dropped = dropping if bad < read else "; there are no other rows"
    raise DataError(
        f"{what}: {bad:,} of {counted(read, 'row')} {said}{first}:\n{lines}Correct {them}{dropped}"
    )


def by_cause(lines: Iterable[str]) -> list[str]:
    """Lines as written; those of a file with the same cause are one: "a.jsonl:3, 7, 9: no answer"."""
    rows: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        where, _, cause = line.strip().partition(": ")
        file, _, number = where.rpartition(":")
        rows.setdefault((file, cause), []).append(number)
    return [f"{file}:{', '.join(numbers)}: {cause}" for (file, cause), numbers in rows.items()]


def dropped_lines(folder: Path, stats: SplitsStats) -> list[str]:
    """What is to be said of rows that were left out of tokenized data: nothing, or a line."""
    bad = sum(found["dropped"].get(DROPPED, 0) for found in splits_of(stats).values())
    return [f"{counted(bad, 'row')} left out as {DROPPED}: see {folder / FILE}"] if bad else []
