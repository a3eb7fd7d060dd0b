"""Tables for evaluation and for the end of a run: plain numbers in, rich renderables out."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table as ScreenTable
from rich.text import Text

from sft_play.choices import metrics as choices
from sft_play.plan import EARLIER, PROBED
from sft_play.report.layout import apart
from sft_play.report.table import Table, on_screen
from sft_play.ui.screen import NamedValues, Words
from sft_play.units import counted, format_bytes, format_count, format_duration, format_range

MISSING = "n/a"
SPEED_UP = "speed\u2011up"  # head of a column: a plain hyphen would be broken after
NOT_RECORDED = "Nothing was recorded."
NOT_YET = "Nothing yet: this is written when the run ends."
TIMES = 3  # from here on, a prediction is so many times too high or low, not so many percent
SAMPLE_LINES = 8
SAMPLE_CHARACTERS = 400  # of each text on the console; files have the full texts

Format = Callable[[Any], str]
# Model -> its scores, or task with its settings -> what lm-eval found.
Models = Mapping[str, Mapping[str, Any]]


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def _perplexity_text(value: float) -> str:
    """With two digits of a diverged model's, which would else have up to 300."""
    return f"{value:,.2f}" if value < 1e6 else f"{value:.1e}"


# Key of a result -> label and number format.
METRICS: dict[str, tuple[str, Format]] = {
    "loss": ("loss", "{:.4f}".format),
    "perplexity": ("perplexity", _perplexity_text),
    "token_accuracy": ("token accuracy", _percent),
    **{name: (row.label, row.form.format) for name, row in choices.METRICS.items()},
}
# The same for what `make eval` says about the work on each model.
AMOUNTS: dict[str, tuple[str, Format]] = {
    "rows": ("rows", "{:,}".format),
    "answered_rows": ("answers", "{:,}".format),
    "seconds": ("time", format_duration),
}


def formatted(value: object, form: Format) -> str:
    """The text of a number; n/a if it is none, or none of its kind, such as an infinite number of bytes."""
    try:
        return form(value) if isinstance(value, int | float) else MISSING
    except (ArithmeticError, ValueError):
        return MISSING


def metric_values(columns: Models) -> list[tuple[str, Format, list[Any]]]:
    """Each metric that a column (name -> scores) has: label, format, and the value in each column."""
    found = [
        (label, form, [scores.get(key) for scores in columns.values()])
        for key, (label, form) in METRICS.items()
    ]
    own = [tree if isinstance(tree := each.get("own_metrics"), dict) else {} for each in columns.values()]
    for name in dict.fromkeys(name for scores in own for name in scores):
        found.append((str(name), "{:.4g}".format, [scores.get(name) for scores in own]))
    return [row for row in found if any(value is not None for value in row[2])]


def metric_table(columns: Models, name: str = "metric", caption: str = "") -> Table:
    """The metrics of the columns, and their values; `name` is the head of the metrics."""
    rows = [
        (label, *(MISSING if value is None else form(value) for value in values))
        for label, form, values in metric_values(columns)
    ]
    return Table((name, *columns), rows, caption)


def perplexity(loss: float) -> float:
    """exp(loss), capped so that it stays finite in JSON for a diverged model."""
    return math.exp(min(loss, 700.0))


def evaluation_table(result: Mapping[str, Any]) -> RenderableType:
    """The result of `make eval`: the metrics of each model, and the rows that they were computed on."""
    models = result["models"]
    rows = [*metric_table(models).rows]
    for key, (label, form) in AMOUNTS.items():
        rows.append((label, *(formatted(scores.get(key), form) for scores in models.values())))
    table = on_screen(Table(("metric", *models), rows))
    tokens = format_count(result["supervised_tokens"])
    title = Text(f"{result['name']} on the {result['split']} split", style="bold")
    title += Text(f"  the loss is over {tokens} supervised tokens", style="dim not bold")
    return Group(title, table, *(Words(note) for note in evaluation_notes(result)))


def evaluation_notes(result: Mapping[str, Any]) -> list[Text]:
    """What to know about the scores of `make eval` before comparing them."""
    notes = []
    answered_rows = result["answered_rows"]
    if (matchable := result.get("exact_match_rows", answered_rows)) != answered_rows:
        rows = counted(matchable, "row")
        notes.append(Text(f"exact match: over {rows} whose reference matches eval.answer_pattern"))
    if calls := result.get("tool_calls_rows"):
        notes.append(Text(f"tool calls right: over the {counted(calls, 'answer')} that should call tools"))
    dtypes = {name: scores.get("dtype") for name, scores in result["models"].items()}
    if len(set(dtypes.values())) > 1:
        text = "; ".join(f"{name} in {dtype}" for name, dtype in dtypes.items())
        notes.append(Text(f"not computed alike: {text}"))
    for name, scores in result["models"].items():
        if scores.get("unfinished_answers"):
            notes.append(Text(f"{name}: ") + unfinished_note(scores))
    if result.get("left_out"):
        notes.append(Text(f"merged: omitted, because {result['left_out']}"))
    return notes


def answered(scores: Mapping[str, Any]) -> str:
    """How many answers were generated, and to what: "12 answers on val, 6 of which should call tools"."""
    text = f"{counted(scores['answered_rows'], 'answer')} on {scores['split']}"
    calls = scores.get("tool_calls_rows")
    return f"{text}, {calls:,} of which should call tools" if calls else text


def unfinished_note(result: Mapping[str, Any]) -> Text:
    """How many answers were truncated, which lowers exact match."""
    cut, answers = result["unfinished_answers"], counted(result["answered_rows"], "answer")
    return Text(
        f"{cut:,} of {answers} {'was' if cut == 1 else 'were'} truncated at "
        f"{result['max_new_tokens']:,} tokens (eval.max_new_tokens)",
        style="yellow",
    )


def shorten(text: str, limit: int = SAMPLE_CHARACTERS, lines: int = SAMPLE_LINES) -> str:
    """Strips `text` and truncates it to `limit` characters and `lines` lines, noting how much is missing."""
    text = text.strip()
    kept = "\n".join(text.split("\n")[:lines])[:limit]
    return text if kept == text else f"{kept.rstrip()} ... ({len(text) - len(kept):,} more characters)"


def mark(name: str, sample: Mapping[str, Any]) -> str:
    """What follows the name of an answer that is known to be right, or wrong; else ""."""
    right = sample["right"].get(name) if isinstance(sample.get("right"), dict) else None
    return {True: ", right", False: ", wrong"}[right] if isinstance(right, bool) else ""


def samples_table(samples: Iterable[Mapping[str, Any]]) -> RenderableType:
    """Prompt, reference, and the answers before and after training, or of each model, side by side."""
    blocks: list[RenderableType] = []
    styles = {", right": "green", ", wrong": "red", "": "dim"}
    for sample in samples:
        texts = {name: shorten(text) or "(empty)" for name, text in sample.items() if isinstance(text, str)}
        asked = [(key, Text(texts.pop(key))) for key in ("prompt", "reference")]
        answers = ScreenTable(box=None, pad_edge=False, padding=(0, 3, 0, 0), expand=True)
        for name in texts:
            said = mark(name, sample)
            answers.add_column(Text(name + said, styles[said]), ratio=1, overflow="fold")
        answers.add_row(*map(Text, texts.values()))
        blocks.append(Group(NamedValues(asked), answers))
    return apart(*blocks)


def said_of(origin: str | None) -> str:
    """What a number that was known before the run is called."""
    return {EARLIER: "from an earlier run", PROBED: "probed"}.get(origin or "", "predicted")


def _step_range(plan: Mapping[str, Any]) -> tuple[float, float, float]:
    """The seconds of a step by which plans are compared, the least and the most; of a plan that has them."""
    seconds = plan["step_seconds"]
    return seconds, *(plan.get("step_seconds_range") or (seconds, seconds))


def by_duration(plan: Mapping[str, Any], value: float | None, form: Format) -> str:
    """A number that grows with the seconds of a step, such as hours or a price, as their range has it."""
    if value is None:
        return MISSING
    seconds, least, most = _step_range(plan)
    return format_range(value * least / seconds, value * most / seconds, form)


def by_speed(plan: Mapping[str, Any], value: float | None, form: Format) -> str:
    """A number that grows with the steps per second, as the range of their seconds has it."""
    if value is None:
        return MISSING
    seconds, least, most = _step_range(plan)
    return format_range(value * seconds / most, value * seconds / least, form)


def step_seconds(
    summary: Mapping[str, Any],
) -> tuple[float | None, float | None, str | None, float | None]:
    """The arguments of `step_line`."""
    expected, measured = (summary.get(f"{kind}_step_seconds") for kind in ("predicted", "measured"))
    return expected, measured, summary.get("predicted_step_origin"), summary.get("refuted_step_seconds")


def step_line(
    predicted: float | None,
    measured: float | None,
    origin: str | None = None,
    refuted: float | None = None,
) -> str:
    """Predicted and measured seconds of an optimizer step in one line.

    `refuted` are those that were predicted by a profile which the probe has shown to be wrong.
    """
    if measured and (wrong := refuted or _far_off(predicted, measured, origin)):
        said = f"took {format_duration(measured)}; the plan's {format_duration(wrong)} was wrong"
        return f"{said}, its profile is measured again next time" if refuted else said
    return _compared(predicted, measured, origin, format_duration, "{:.0f}%")


def _far_off(predicted: float | None, measured: float, origin: str | None) -> float | None:
    """A prediction that is so far off that by how much says nothing; None if it is not."""
    if not predicted or origin in (EARLIER, PROBED):
        return None
    return predicted if max(predicted / measured, measured / predicted) >= TIMES else None


def memory_line(predicted: int | None, measured: int | None, origin: str | None = None) -> str:
    """Predicted and measured memory in one line.

    Example: `memory_line(100 * GIB, 101 * GIB)` is
    "predicted 100.00 GiB, measured 101.00 GiB (prediction 1.0% too low)".
    """
    return _compared(predicted, measured, origin, format_bytes, "{:.1f}%")


def _compared(
    predicted: float | None, measured: float | None, origin: str | None, form: Format, percent: str
) -> str:
    """Two numbers, and the error of a prediction; what an earlier run measured is none."""
    line = f"{said_of(origin)} {formatted(predicted, form)}, measured {formatted(measured, form)}"
    if not predicted or not measured or origin in (EARLIER, PROBED):
        return line
    error, side = 100 * abs(measured - predicted) / measured, "low" if measured > predicted else "high"
    if error < 0.05:
        return f"{line} (prediction accurate to 0.05%)"
    times = max(predicted / measured, measured / predicted)
    if times >= TIMES:
        return f"{line} (prediction {times:,.0f} times too {side})"
    return f"{line} (prediction {percent.format(error)} too {side})"


def with_perplexity(scores: Mapping[str, Any]) -> dict[str, Any]:
    """The scores, and the perplexity of their loss if there is one."""
    if scores.get("loss") is None:
        return dict(scores)
    return {**scores, "perplexity": perplexity(scores["loss"])}


COMPARED = {"merged": "merged model", "base": "base model", "adapter_on_4bit": "adapter on 4-bit base (info)"}


@dataclass(frozen=True)
class Tolerance:
    """Allowed difference between the merged model and the adapter model."""

    mean: float  # mean absolute difference of the logits, relative to their standard deviation
    top1: float  # share of positions at which both predict the same next token


@dataclass(frozen=True)
class LogitDifference:
    """Difference of the logits of two models on the same tokens."""

    max_abs: float
    mean_abs: float
    relative_mean: float  # mean_abs relative to the standard deviation of the reference
    top1: float
    positions: int


def logits_table(
    measured: Mapping[str, LogitDifference], tolerance: Tolerance, dtype: str, rows: int, *, passed: bool
) -> RenderableType:
    """The result of `make merge-test`: differences from the logits of the adapter on the unquantized base.

    "mean / std" is the mean difference relative to the standard deviation of the logits.
    """
    table = on_screen(Table(("logit difference", "max", "mean", "mean / std", "same top-1"), []))
    for key, label in COMPARED.items():
        if found := measured.get(key):
            differences = (f"{size:.1e}" for size in (found.max_abs, found.mean_abs, found.relative_mean))
            table.add_row(label, *differences, _percent(found.top1))
    allowed = ("", "", f"{tolerance.mean:.1e}", f">= {_percent(tolerance.top1)}")
    table.add_row(f"tolerance for {dtype}", *allowed, style="dim")
    verdict = Text("passed", style="bold green") if passed else Text("failed", style="bold red")
    compared = f"{counted(rows, 'row')}, {counted(measured['merged'].positions, 'position')}"
    return Group(table, verdict + Text(f": compared with the adapter on the unquantized base, {compared}"))


def harness_table(models: Models, tasks: Iterable[str]) -> Table:
    """Task, metric, number of rows, and the value of each model of eval-lm.json, for some of its tasks."""
    rows = []
    for task in tasks:
        known = [found[task] for found in models.values() if task in found]
        for metric in dict.fromkeys(name for one in known for name in one["metrics"]):
            values = (_value(found.get(task, {}).get("metrics", {}).get(metric)) for found in models.values())
            rows.append((task, metric, f"{known[0]['rows']:,}", *values))
    return Table(("task", "metric", "rows", *models), rows, "lm-eval, with the standard error", left=(0, 1))


def _value(found: Mapping[str, Any] | None) -> str:
    """A value and its standard error."""
    if not found:
        return MISSING
    error = found.get("stderr")
    return f"{found['value']:.4g}" + (f" ± {error:.2g}" if error else "")
