"""The tables that evaluation and the end of a run print: plain numbers in, rich renderables out."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from sft_play.units import format_bytes, format_count, format_duration

MISSING = "n/a"
LARGE_BATCH = 0.98  # of the tokens that a batch may have: below, a difference to the prediction is to be expected
SAMPLE_LINES = 8
SAMPLE_CHARACTERS = 400  # of each text on the screen; the files hold them whole

Format = Callable[[Any], str]


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


# key of a result -> what a person reads, and how the number is written
METRICS: dict[str, tuple[str, Format]] = {
    "loss": ("loss", "{:.4f}".format),
    "perplexity": ("perplexity", "{:,.2f}".format),
    "token_accuracy": ("token accuracy", _percent),
    "exact_match": ("exact match", _percent),
    "rouge_l": ("ROUGE-L (0 to 1)", "{:.3f}".format),
    "chrf": ("chrF (0 to 100)", "{:.1f}".format),
}


def _number(value: Any, form: Format) -> str:
    return MISSING if value is None else form(value)


def _rows(count: int) -> str:
    return f"{count:,} row{'' if count == 1 else 's'}"


def _facts(rows: Iterable[tuple[str, str]] = ()) -> Table:
    """Two columns without lines: a dim name and its value, which is never read as markup."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    return table


def _columns(*names: str) -> Table:
    """A table with a line under its head and numbers to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, name in enumerate(names):
        table.add_column(name, justify="right" if index else "left")
    return table


def perplexity(loss: float) -> float:
    """exp(loss): how many tokens the model wavers between; a diverged model's stays finite, so that JSON can hold it."""
    return math.exp(min(loss, 700.0))


def evaluation_table(result: Mapping[str, Any]) -> RenderableType:
    """The result of `make eval`: the metrics, and over how many rows each was taken."""
    table = _columns("metric", "value")
    table.add_column("over", style="dim")
    all_rows = f"{format_count(result['supervised_tokens'])} supervised tokens of {_rows(result['rows'])}"
    generated = f"answers to {_rows(result['answered_rows'])}"
    for key, (label, form) in METRICS.items():
        over = all_rows if key in ("loss", "perplexity", "token_accuracy") else generated
        if key == "exact_match" and result.get("exact_match_rows", result["answered_rows"]) != result["answered_rows"]:
            over = f"the {_rows(result['exact_match_rows'])} whose reference holds eval.answer_pattern"
        table.add_row(label, _number(result.get(key), form), over)
    title = Text(f"{result['name']} on the {result['split']} split", style="bold")
    notes = [unfinished_note(result)] if result.get("unfinished_answers") else []
    return Group(title, table, *notes)


def unfinished_note(result: Mapping[str, Any]) -> Text:
    """Says how many answers were cut off, which lowers exact match for a reason that is not the model's."""
    return Text(
        f"{result['unfinished_answers']} of {result['answered_rows']} answers were cut off at "
        f"{result['max_new_tokens']} tokens (eval.max_new_tokens)",
        style="yellow",
    )


def before_after_table(before: Mapping[str, Any], after: Mapping[str, Any], name: str = "metric") -> Table:
    """The metrics that either side has, side by side; `name` heads the first column."""
    table = _columns(name, "before", "after")
    table.columns[2].style = "bold"
    for key, (label, form) in METRICS.items():
        if key in before or key in after:
            table.add_row(label, _number(before.get(key), form), _number(after.get(key), form))
    return table


def shorten(text: str, limit: int = SAMPLE_CHARACTERS, lines: int = SAMPLE_LINES) -> str:
    """`text` without outer white space, cut at so many characters and lines with a note of how many characters are missing."""
    text = text.strip()
    kept = "\n".join(text.split("\n")[:lines])[:limit]
    return text if kept == text else f"{kept.rstrip()} ... ({len(text) - len(kept):,} more characters)"


def samples_table(samples: Iterable[Mapping[str, str]]) -> RenderableType:
    """Prompt, reference and the answers before and after training, one block for each sample."""
    blocks: list[RenderableType] = []
    styles = {"prompt": "", "reference": "", "before": "red", "after": "green"}
    for sample in samples:
        block = _facts()
        for key, style in styles.items():
            if key in sample:
                block.add_row(key, Text(shorten(sample[key]) or "(nothing)", style=style))
        blocks += [block, ""]
    return Group(*blocks[:-1])


def _run_facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    keys = ("micro_batch_size", "gradient_accumulation_steps", "world_size", "effective_batch_size")
    micro, accumulated, world, effective = (summary.get(key, MISSING) for key in keys)
    words = "tokens" if summary.get("packing") else "sequences"
    processes = "process" if world == 1 else "processes"
    learned = f"{_number(summary.get('optimizer_steps'), '{:,} steps'.format)}, "
    learned += f"{_number(summary.get('supervised_tokens'), format_count)} supervised tokens"
    return [
        ("plan", f"{micro} (micro-batch) x {accumulated} (accumulation) x {world} ({processes}) = {effective} {words}"),
        ("learned", learned),
        ("speed", _number(summary.get("tokens_per_second"), "{:,.0f} tokens/s, padding not counted".format)),
        (
            "memory",
            memory_line(
                summary.get("predicted_peak_bytes"),
                summary.get("measured_peak_bytes"),
                (summary.get("probe") or {}).get("batch_share", 1.0),
            ),
        ),
        ("train loss", _number(summary.get("train_loss"), "{:.4f}".format)),
    ]


def memory_line(predicted: int | None, measured: int | None, batch_share: float = 1.0) -> str:
    """`memory_line(100 * GIB, 101 * GIB)` is "predicted 100.00 GiB, measured 101.00 GiB (prediction 1.0 % too low)".

    `batch_share` is how many of the tokens that a batch may have the largest one had, which is said where it explains a lot.
    """
    line = f"predicted {_number(predicted, format_bytes)}, measured {_number(measured, format_bytes)}"
    if not predicted or not measured:
        return line
    error = 100 * (measured - predicted) / measured
    if abs(error) < 0.05:
        return f"{line} (prediction right within 0.05 %)"
    if batch_share < LARGE_BATCH:
        return f"{line} (its largest batch has {batch_share:.0%} of the tokens that are planned for)"
    return f"{line} (prediction {abs(error):.1f} % too {'low' if error > 0 else 'high'})"


def _with_perplexity(scores: Mapping[str, Any]) -> dict[str, Any]:
    return {**scores, "perplexity": perplexity(scores["loss"])} if scores.get("loss") is not None else dict(scores)


def closing_screen(
    summary: Mapping[str, Any], comparison: Mapping[str, Any] | None, places: Mapping[str, Any], next_commands: Sequence[str]
) -> RenderableType:
    """The one screen that a training run ends with.

    Args:
        summary: summary.json; `eval` in it holds {"before": {...}, "after": {...}} of the validation loss.
        comparison: {"before": {...}, "after": {...}, "samples": [...]} of generated answers; None if there are none.
        places: name -> path of what the run leaves behind.
        next_commands: what to type next.
    """
    losses, answers = summary.get("eval") or {}, comparison or {}
    before, after = (_with_perplexity({**(losses.get(when) or {}), **answers.get(when, {})}) for when in ("before", "after"))
    blocks: list[RenderableType] = [_facts(_run_facts(summary))]
    if before or after:
        answered = f" (answers to {_rows(after['answered_rows'])} of {after['split']})" if "answered_rows" in after else ""
        blocks.append(before_after_table(before, after, f"held-out rows{answered}"))
        if after.get("unfinished_answers"):
            blocks[-1] = Group(blocks[-1], unfinished_note(after))
    if answers.get("samples"):
        blocks.append(samples_table(answers["samples"]))
    where = _facts((name, str(path)) for name, path in places.items())
    for index, command in enumerate(next_commands):
        where.add_row("" if index else "next", Text(command, style="bold cyan"))
    seconds = summary.get("training_seconds")
    title = Text(str(summary.get("status", MISSING)), style="bold")
    title += Text(f": trained for {format_duration(seconds)}" if seconds else "")
    return Group(Rule(title, align="left"), *(part for block in blocks for part in (block, "")), where)


COMPARED = {
    "merged": "merged model",
    "base": "base alone",
    "adapter_on_4bit": "adapter on 4-bit (info)",
}


def logits_table(result: Mapping[str, Any]) -> RenderableType:
    """How far each model's logits are from those of the adapter on the un-quantised base (the result of `make merge-test`).

    "in deviations" is the average as a share of the logits' standard deviation.
    """
    table = _columns("logits, off by", "at most", "on average", "in deviations", "same top-1")
    for key, label in COMPARED.items():
        if key in result:
            row = result[key]
            table.add_row(
                label, f"{row['max_abs']:.1e}", f"{row['mean_abs']:.1e}", f"{row['relative_mean']:.1e}", _percent(row["top1"])
            )
    tolerance = result["tolerance"]
    table.add_row(
        f"allowed in {result['dtype']}", "", "", f"{tolerance['mean']:.1e}", f">= {_percent(tolerance['top1'])}", style="dim"
    )
    verdict = Text("passed", style="bold green") if result["passed"] else Text("failed", style="bold red")
    positions = result["merged"]["positions"]
    what = f": against the adapter on the un-quantised base, {_rows(result['rows'])}, {positions:,} positions"
    return Group(table, verdict + Text(what))
