"""Compares our predictions with what others measured on GPUs; needs no GPU.

Without arguments it predicts the published rows and writes benchmarks/results/evidence.json. Files named as
arguments are predicted instead; benchmarks/evidence/runs.py describes their form.
"""

import argparse
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.evidence.predict import described, errors_of
from benchmarks.evidence.runs import ROWS, read_sources
from benchmarks.measurement_log import RESULTS, versions, write_result
from sft_play.errors import ConfigError
from sft_play.ui.console import console

FILE = RESULTS / "evidence.json"
ERRORS = ("allocated", "publisher_allocated", "reserved", "process", "publisher_process", "tokens_per_second")


def main(arguments: list[str]) -> int:
    """Predicts every row of the files and prints the errors."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="default: the published rows")
    files = parser.parse_args(arguments).files
    warnings.simplefilter("ignore")
    began = time.monotonic()
    try:
        sources = list(read_sources(files or sorted(ROWS.glob("*.json"))))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    found = [described(source, errors_of(source)) for source in sources]
    if files:
        for source in found:
            console().print(rows_table(source))
    console().print(table(found))
    if not files:
        rows = {f"rows_{source['source']}": source.pop("rows") for source in found}
        about = {"what": (__doc__ or "").splitlines()[0], "versions": versions()}
        write_result(FILE, about | {"seconds": round(time.monotonic() - began, 1), "sources": found}, rows)
        console().print(f"wrote {FILE}")
    return 0


def _both(spread: dict[str, float] | None) -> str:
    return f"{spread['median']:.2%} / {spread['worst']:+.2%}" if spread else "-"


def table(found: list[dict[str, Any]]) -> Table:
    """The errors of each source: median and worst."""
    result = Table(title="Median / worst error, positive if predicted too high")
    for name in (
        "measured by others",
        "rows",
        "allocated",
        "publisher's",
        "reserved",
        "process",
        "publisher's",
        "tokens/s",
    ):
        result.add_column(name, justify="left" if name.startswith("measured") else "right")
    for source in found:
        summary = source["summary"]
        allocated = _both(summary["allocated"])
        if summary["after_step"]:
            allocated = f"{_both(summary['after_step'])} after a step"
        cells = [allocated, *(_both(summary[name]) for name in ERRORS[1:])]
        gpu = source.get("gpu", "unknown GPU").split(",")[0]
        result.add_row(f"{gpu}: {source['source']}", str(len(source["rows"])), *cells)
    return result


def rows_table(source: dict[str, Any]) -> Table:
    """Each row of a source: measured and predicted MiB."""
    result = Table(title=source["source"])
    for name in ("step", "what", "measured MiB", "predicted MiB", "error"):
        result.add_column(name, justify="left" if name in ("step", "what") else "right")
    for row in source["rows"]:
        for what, error in row["errors"].items():
            measured, predicted = row["measured_mib"][what], row["predicted_mib"][what]
            result.add_row(row["name"], what, f"{measured:.0f}", f"{predicted:.0f}", f"{error:+.2%}")
        if "tokens_per_second" in row:
            speed = row["tokens_per_second"]
            sizes = (f"{speed['measured']:.0f} tokens/s", f"{speed['predicted']:.0f} tokens/s")
            result.add_row(row["name"], "speed", *sizes, f"{speed['error']:+.2%}")
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
