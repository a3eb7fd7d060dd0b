"""The list of runs: what each is doing or how it ended, and its most important numbers."""

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import quote, urlencode

from sft_play.choices.metrics import DEFAULT
from sft_play.config.methods import METHODS
from sft_play.report.choices import shown
from sft_play.report.html import Page
from sft_play.report.plan import engine_label
from sft_play.report.record import OTHER_FORM, RunRecord, scores_of_models
from sft_play.report.run_page import progress_line, share_done, status_word, tokens_per_second
from sft_play.report.tables import METRICS, MISSING, formatted
from sft_play.secrets import redact
from sft_play.units import counted, format_bytes

TEMPLATE, ROW = "runs.html.j2", "runs_row.html.j2"
LOSS = "{:.4f}".format
NOT_UTF8 = "its name is not UTF-8: rename the folder to open it"
SCORES = (*DEFAULT, "token_accuracy")  # from what says most to what says least
WORDS = ("run", "status", "model", "method", "engine", "GPU")  # columns of texts


class Cell(NamedTuple):
    """What is in a column, and by what the column is sorted: numbers or a text; None comes last."""

    column: str
    text: str
    order: tuple[float, ...] | str | None


@dataclass(frozen=True)
class RunRow:
    """A run in the list; all but the share of its steps are texts."""

    name: str
    address: str  # of its page; "" if it can have none
    status: str
    progress: str  # the step and the time left of a run that is running
    share: float | None  # of the steps that are done; None if it is not running
    note: str
    cells: Sequence[Cell]
    active: bool  # whether something works on it

    @property
    def sorted_by(self) -> dict[str, tuple[float, ...] | str | None]:
        """Column -> what the row has in it to sort by."""
        named = {"run": self.name.lower(), "status": self.status}
        return named | {cell.column: cell.order for cell in self.cells}

    def matches(self, words: Sequence[str]) -> bool:
        """Whether each of these words, in lower case, is somewhere in the row."""
        texts = (self.name, self.status, self.note, *(cell.text for cell in self.cells))
        whole = " ".join(texts).lower()
        return all(word in whole for word in words)


def run_row(run: RunRecord) -> RunRow:
    """The row of a run."""
    name, status = os.fsencode(run.name).decode(errors="backslashreplace"), [status_word(run)]
    own_name = name == run.name
    status += [f"cannot be read: {', '.join(run.damaged)}"] if run.damaged else []
    status += [] if own_name else [NOT_UTF8]
    address = f"/runs/{quote(redact(name))}" if own_name else ""
    return RunRow(
        name=name,
        address=address,
        status="; ".join(status),
        progress=progress_line(run) if run.activity == "running" else "",
        share=share_done(run),
        note=str(run.value("output.note") or ""),
        cells=_cells(run),
        active=bool(run.activity),
    )


def _cells(run: RunRecord) -> tuple[Cell, ...]:
    running, predicted = run.activity == "running", run.predicted_peak_bytes
    measured = run.summary.get("measured_peak_bytes")
    if running:  # on a CPU the process's memory is seen, which is not what is predicted
        measured = run.latest("memory/peak_bytes") if run.chosen.get("device") == "cuda" else None
    memory = _number("memory", measured or predicted, lambda size: format_bytes(int(size)))
    if predicted and not measured:
        memory = Cell(memory.column, f"{memory.text} predicted", memory.order)
    mode = str(run.value("tuning.mode"))
    return (
        _word("model", shown(run, "model.name")),
        _word("method", METHODS.get(mode, MISSING).removesuffix(" fine-tuning")),
        _word("engine", engine_label(run.chosen) if run.chosen.get("engine") else MISSING),
        _word("GPU", _device(run)),
        _number("steps", run.last_step, "{:,}".format),
        _number("training loss", run.latest("train/loss"), LOSS),
        _number("held-out loss", run.latest("eval/loss"), LOSS),
        _best_score(run),
        _number("tokens/s", tokens_per_second(run), "{:,.0f}".format),
        memory,
        _word("started", str(run.environment.get("started") or MISSING)),
    )


def _word(column: str, text: str) -> Cell:
    return Cell(column, text, None if text == MISSING else text.lower())


def _number(column: str, value: object, form: Callable[..., str]) -> Cell:
    text = formatted(value, form)
    return Cell(column, text, (value,) if isinstance(value, int | float) and text != MISSING else None)


def _device(run: RunRecord) -> str:
    """How many of which GPU the run has used, or that it has used the CPU."""
    if run.chosen.get("device") == "cpu":
        return "CPU"
    with contextlib.suppress(*OTHER_FORM):
        name = str(run.environment["gpus"][0]["name"]).removeprefix("NVIDIA ")
        return f"{run.chosen['world_size']} x {name}"
    return MISSING


def _best_score(run: RunRecord) -> Cell:
    """The highest score after training, or of `make eval`, by the first of SCORES that is not 0 everywhere.

    Runs are sorted by which score it is, then by its value.
    """
    results = [run.scores("after")]
    for found in run.evaluations.values():
        models = scores_of_models(found)
        results += [scores for name, scores in models.items() if name != "base"] or [found]
    known = {key: [one[key] for one in results if isinstance(one.get(key), int | float)] for key in SCORES}
    best = {key: max(values) for key, values in known.items() if values}
    key = next((key for key, value in best.items() if value), next(iter(best), None))
    if key is None:
        return Cell("best score", MISSING, None)
    label, form = METRICS[key]
    text = f"{label.partition(' (')[0]} {formatted(best[key], form)}"
    return Cell("best score", text, (-SCORES.index(key), best[key]))


class Head(NamedTuple):
    """The head of a column, the address that sorts by it, and how it is sorted now."""

    column: str
    address: str
    direction: str  # of aria-sort; "" if it is not sorted by this column


def heads(row: RunRow, find: str, sort: str) -> list[Head]:
    """Those of a list with such a row; a click sorts by the column, another one the other way round."""
    found = []
    for column in row.sorted_by:
        direction = {column: "ascending", f"-{column}": "descending"}.get(sort, "")
        first = column if column in WORDS or column.endswith("loss") else f"-{column}"
        other = column if sort == f"-{column}" else f"-{column}"
        query = urlencode({"find": redact(find), "sort": other if direction else first})
        found.append(Head(column, f"/?{query}", direction))
    return found


def selected(rows: Sequence[RunRow], find: str, sort: str) -> list[int]:
    """Which rows have all words of `find`, in the order of a column, or its reverse as "-column"."""
    words, column = find.lower().split(), sort.removeprefix("-")
    found = [index for index, row in enumerate(rows) if row.matches(words)]
    orders = {index: rows[index].sorted_by.get(column) for index in found}
    known = [index for index in found if orders[index] is not None]
    known.sort(key=lambda index: orders[index], reverse=sort != column)  # type: ignore[arg-type,return-value]
    return known + [index for index in found if orders[index] is None]


def runs_page(rows: Sequence[RunRow], folder: str, count: int) -> Page:
    """The page of all rows, of which `count` are shown; they come beside it."""
    active = sum(row.active for row in rows)
    said = f"{counted(len(rows), 'run')} in {folder}, {active or 'none'} of them running"
    said += f"; {count:,} shown" if count < len(rows) else ""
    return Page("Runs", said if rows else f"There are no runs in {folder} yet", [])
