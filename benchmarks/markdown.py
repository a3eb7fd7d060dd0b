"""Markdown of the documentation's tables, and the files that they are made from."""

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sft_play.report.table import Table, markdown
from sft_play.units import GIB, MIB

GB = 10**9
ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def results(name: str) -> dict[str, Any]:
    """A file of benchmarks/results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    return markdown(Table(list(head), list(map(list, rows))))


def spread(errors: list[float]) -> str:
    """Median of the sizes of errors and the worst with its sign."""
    if not errors:
        return "-"
    return summarized({"median": statistics.median(map(abs, errors)), "worst": max(errors, key=abs)})


def summarized(found: dict[str, float] | None) -> str:
    """A spread as text."""
    return "-" if found is None else f"{found['median']:.2%} / {signed(found['worst'], 2)}"


def signed(share: float, digits: int) -> str:
    """A share in percent with its sign, but zero without one."""
    shown = f"{share:+.{digits}%}"
    return shown[1:] if float(shown[:-1]) == 0 else shown


def in_unit(value: float, unit: int) -> str:
    """Bytes in a unit, or with unit 1 tokens per second."""
    name = {GIB: "GiB", MIB: "MiB", GB: "GB", 1: "tokens/s"}[unit]
    return f"{value / unit:,.{2 if unit in (GIB, GB) else 0}f} {name}"
