"""The scores of lm-eval: what eval-lm.json holds, as rows for the console and for the report."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import RenderableType

from sft_play.report.layout import columns
from sft_play.report.tables import MISSING

Models = Mapping[str, Mapping[str, Any]]  # model -> task with its settings -> what lm-eval found


def harness_rows(models: Models, tasks: Iterable[str]) -> list[tuple[str, ...]]:
    """Task, metric, number of rows, and the value of each model.

    Args:
        models: of eval-lm.json.
        tasks: to show, with their settings.
    """
    rows = []
    for task in tasks:
        known = [found[task] for found in models.values() if task in found]
        for metric in dict.fromkeys(name for one in known for name in one["metrics"]):
            values = (_value(found.get(task, {}).get("metrics", {}).get(metric)) for found in models.values())
            rows.append((task, metric, f"{known[0]['rows']:,}", *values))
    return rows


def harness_table(models: Models, tasks: Iterable[str]) -> RenderableType:
    """The result of `make eval-lm`, beside what the other models of the run reached on the same rows."""
    table = columns("task", "metric", "rows", *models)
    table.columns[1].justify = "left"
    for row in harness_rows(models, tasks):
        table.add_row(*row)
    return table


def _value(found: Mapping[str, Any] | None) -> str:
    """A value and its standard error."""
    if not found:
        return MISSING
    error = found.get("stderr")
    return f"{found['value']:.4g}" + (f" ± {error:.2g}" if error else "")
