"""Scores generated answers against references, by the metrics of a config. Does not import torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import regex

from sft_play.choices.metrics import METRICS, Metric, normalise
from sft_play.config.schema import EvalConfig
from sft_play.errors import ConfigError
from sft_play.report.record import tree_of
from sft_play.spelling import make
from sft_play.ui.console import warn

PATTERN_SECONDS = 2.0  # for eval.answer_pattern to search a text

Scores = dict[str, float | bool | None]  # of one answer, by metric; None where there is nothing to compare


@dataclass(frozen=True)
class Compared:
    """What of an answer is compared with what of its reference."""

    answer: str
    reference: str
    calls: bool = False  # whether both are calls of tools, which eval.answer_pattern is not for
    row: Mapping[str, Any] = field(default_factory=dict)  # messages until the reference, tools, source


def final_answer(text: str, pattern: regex.Pattern[str] | None) -> str | None:
    """What exact match compares: the text, or the first group of the last match; None without a match.

    Raises:
        TimeoutError: the search takes too long, as if the pattern nests repetitions, `(a|aa)+$`, or it takes
            too much memory, as if it recurs, `(?R)`.
    """
    if pattern is None:
        return normalise(text)
    last = None
    try:
        for last in pattern.finditer(text, timeout=PATTERN_SECONDS):  # noqa: B007 - the last one counts
            pass
    except MemoryError:
        raise TimeoutError from None
    if last is None:
        return None
    return normalise((last[1] if pattern.groups else last[0]) or "")  # a group may have no part in a match


def require_answers(references: Sequence[str], pattern: str | None) -> None:
    """Raises ConfigError if eval.answer_pattern matches none of the references, or takes too long."""
    if pattern is None or not references:
        return
    expression = regex.compile(pattern)
    try:
        found = [final_answer(text, expression) for text in references]
    except TimeoutError:
        raise ConfigError(
            f"eval.answer_pattern: {pattern!r} takes more than {PATTERN_SECONDS:g} s, or too much memory, on "
            "a reference; write it without a repetition inside a repetition, and without recursion"
        ) from None
    if all(answer is None for answer in found):
        raise ConfigError(
            f"eval.answer_pattern: {pattern!r} matches none of the {len(references)} references; the first "
            f"one is {references[0][:200]!r}"
        )


def score_answer(compared: Compared, settings: EvalConfig) -> Scores:
    """The scores of an answer by those of eval.metrics that are for it and no functions of one's own."""
    metrics = {name: METRICS[name] for name in settings.metrics if name in METRICS}
    return {
        name: _score(metric, compared, settings)
        for name, metric in metrics.items()
        if compared.calls or not metric.of_calls
    }


def _score(metric: Metric, compared: Compared, settings: EvalConfig) -> float | bool | None:
    answer, reference = compared.answer, compared.reference
    if metric.uses_pattern and settings.answer_pattern and not compared.calls:
        pattern = regex.compile(settings.answer_pattern)  # which keeps what it has compiled
        wanted, said = final_answer(reference, pattern), _generated_answer(answer, pattern)
        return None if wanted is None else said is not None and metric.score(said, wanted)
    return metric.score(answer, reference)


def _generated_answer(text: str, pattern: regex.Pattern[str] | None) -> str | None:
    """The final answer in what a model has said; None, too, if the search takes too long."""
    try:
        return final_answer(text, pattern)
    except TimeoutError:
        warn(
            f"eval.answer_pattern takes more than {PATTERN_SECONDS:g} s, or too much memory, on an answer of "
            f"{len(text):,} characters, which counts as no match"
        )
        return None


def summarise_answers(compared: Sequence[Compared], scores: Sequence[Scores]) -> dict[str, float | None]:
    """Each metric over all answers, at least one: a mean, or that of the library for a corpus."""
    found: dict[str, float | None] = {"answered_rows": len(scores)}
    for name in dict.fromkeys(name for each in scores for name in each):
        values = [value for each in scores if (value := each.get(name)) is not None]
        metric = METRICS.get(name)
        if metric and metric.of_all:
            references = [each.reference for each in compared]
            found[name] = metric.of_all([each.answer for each in compared], references)
        else:
            found[name] = sum(values) / len(values) if values else None
        if metric and (metric.uses_pattern or metric.of_calls):
            found[f"{name}_rows"] = len(values)
    return found


def tools_note(summary: Mapping[str, Any]) -> str:
    """What a chat with a run says if its held-out rows, of which summary.json has the scores, call tools."""
    scores = tree_of(tree_of(summary.get("eval")).get("after"))
    rows = make("infer-batch", IN="rows.jsonl")
    said = f"Its rows call tools: /tools FILE offers those of a file; `{rows}` takes rows with their own."
    return said if scores.get("tool_calls_rows") else ""


def is_right(scores: Scores, names: Sequence[str]) -> bool | None:
    """Whether an answer is right, by the first of the metrics that says so with a bool; None if none does."""
    values = (scores.get(name.rpartition(":")[2]) for name in names)
    return next((value for value in values if isinstance(value, bool)), None)


def as_written(scores: Mapping[str, object], names: Sequence[str]) -> dict[str, object]:
    """Scores as files have them: those of functions, which may have any name, under "own_metrics"."""
    functions = [name.rpartition(":")[2] for name in names if ":" in name]
    own = {name: scores[name] for name in functions if name in scores}
    rest = {name: value for name, value in scores.items() if name not in own}
    return {**rest, "own_metrics": own} if own else rest
