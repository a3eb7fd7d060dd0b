"""Generated answers against their references: exact match, ROUGE-L, chrF. No torch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sft_play.errors import ConfigError

NUMBER = re.compile(r"[-+]?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?")

# In ASCII text this finds the words that rouge_score's own tokenizer finds. That one drops all other letters, so that answers
# in Cyrillic or Chinese would score 0; here scripts that are written without spaces count by the character.
_NO_SPACES = "\u0e00-\u0eff\u1000-\u109f\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
WORD = re.compile(rf"[{_NO_SPACES}]|[^\W_{_NO_SPACES}]+")


def compile_pattern(pattern: str | None) -> re.Pattern[str] | None:
    """eval.answer_pattern as an expression.

    Raises:
        ConfigError: it is not one.
    """
    try:
        return None if pattern is None else re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"eval.answer_pattern: {pattern!r} is not a regular expression: {error}") from None


def fold(text: str) -> str:
    """White space folded; a number loses thousands commas and a full stop: `fold(" 1,234. ")` is "1234"."""
    folded = " ".join(text.split())
    number = folded.removesuffix(".")
    return number.replace(",", "") if NUMBER.fullmatch(number) else folded


def final_answer(text: str, pattern: re.Pattern[str] | None) -> str | None:
    """What is compared for exact match: the whole text, or the first group of the last match; None without a match."""
    if pattern is None:
        return fold(text)
    last = None
    for last in pattern.finditer(text):  # noqa: B007 - the last one is wanted
        pass
    return None if last is None else fold(last[1] if pattern.groups else last[0])


class _Words:
    """A tokenizer for rouge_score."""

    def tokenize(self, text: str) -> list[str]:
        return WORD.findall(text.lower())


@dataclass(frozen=True)
class AnswerScore:
    """One answer's scores; exact_match is None where the reference has nothing that eval.answer_pattern finds."""

    exact_match: bool | None
    rouge_l: float
    chrf: float


def score_answers(references: Sequence[str], answers: Sequence[str], pattern: str | None = None) -> list[AnswerScore]:
    """Each answer on its own: exact match, ROUGE-L (F1, 0 to 1) and chrF (0 to 100)."""
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics import CHRF

    expression, rouge, chrf = compile_pattern(pattern), RougeScorer(["rougeL"], tokenizer=_Words()), CHRF()
    scores = []
    for reference, answer in zip(references, answers, strict=True):
        wanted = final_answer(reference, expression)
        matched = None if wanted is None else wanted == final_answer(answer, expression)
        rouge_l = rouge.score(reference, answer)["rougeL"].fmeasure
        scores.append(AnswerScore(matched, float(rouge_l), chrf.sentence_score(answer, [reference]).score))
    return scores


def summarise_answers(
    references: Sequence[str], answers: Sequence[str], scores: Sequence[AnswerScore], pattern: str | None = None
) -> dict[str, Any]:
    """The scores of all answers together: means, and sacreBLEU's own chrF over the whole set.

    Raises:
        ConfigError: eval.answer_pattern is found in no reference.
    """
    from sacrebleu.metrics import CHRF

    matched = [score.exact_match for score in scores if score.exact_match is not None]
    if not matched:
        raise ConfigError(
            f"eval.answer_pattern: {pattern!r} is found in none of the {len(references)} references; the first one is "
            f"{references[0][:200]!r}"
        )
    return {
        "answered_rows": len(scores),
        "exact_match": sum(matched) / len(matched),
        "exact_match_rows": len(matched),
        "rouge_l": sum(score.rouge_l for score in scores) / len(scores),
        "chrf": CHRF().corpus_score(list(answers), [list(references)]).score,
    }
