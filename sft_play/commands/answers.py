"""Scores generated answers against references: exact match, ROUGE-L and chrF. Does not import torch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import regex

from sft_play.errors import ConfigError
from sft_play.ui.console import warn

PATTERN_SECONDS = 2.0  # for eval.answer_pattern to search a text
NUMBER = re.compile(r"[-+]?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?")

# For ASCII text, this matches the same words as the default tokenizer of rouge_score, which drops all other
# letters, so that answers in Cyrillic or Chinese would score 0. In scripts written without spaces, each
# character is a word.
_NO_SPACES = "\u0e00-\u0eff\u1000-\u109f\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
WORD = re.compile(rf"[{_NO_SPACES}]|[^\W_{_NO_SPACES}]+")


def normalise(text: str) -> str:
    """Collapses whitespace and cleans up a number: `normalise(" 1,234. ")` is "1234"."""
    folded = " ".join(text.split())
    number = folded.removesuffix(".")
    return number.replace(",", "") if NUMBER.fullmatch(number) else folded


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


class _WordTokenizer:
    """A tokenizer for rouge_score."""

    def tokenize(self, text: str) -> list[str]:
        return WORD.findall(text.lower())


@dataclass(frozen=True)
class AnswerScore:
    """Scores of one answer; exact_match is None if eval.answer_pattern does not match the reference."""

    exact_match: bool | None
    rouge_l: float
    chrf: float


def score_answers(
    references: Sequence[str], answers: Sequence[str], pattern: str | None = None
) -> list[AnswerScore]:
    """Scores each answer: exact match, ROUGE-L (F1, 0 to 1) and chrF (0 to 100)."""
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics import CHRF

    expression = None if pattern is None else regex.compile(pattern)
    rouge, chrf = RougeScorer(["rougeL"], tokenizer=_WordTokenizer()), CHRF()
    scores = []
    for reference, answer in zip(references, answers, strict=True):
        wanted = final_answer(reference, expression)
        matched = None if wanted is None else wanted == _generated_answer(answer, expression)
        rouge_l = rouge.score(reference, answer)["rougeL"].fmeasure
        scores.append(AnswerScore(matched, float(rouge_l), chrf.sentence_score(answer, [reference]).score))
    return scores


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


def summarise_answers(
    references: Sequence[str], answers: Sequence[str], scores: Sequence[AnswerScore]
) -> dict[str, Any]:
    """Aggregates scores, with a match among them (`require_answers`): means, and sacreBLEU's corpus chrF."""
    from sacrebleu.metrics import CHRF

    matched = [score.exact_match for score in scores if score.exact_match is not None]
    return {
        "answered_rows": len(scores),
        "exact_match": sum(matched) / len(matched),
        "exact_match_rows": len(matched),
        "rouge_l": sum(score.rouge_l for score in scores) / len(scores),
        "chrf": CHRF().corpus_score(list(answers), [list(references)]).score,
    }
