"""How answers are compared with references: one row each, from which settings, tables and pages follow."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

NUMBER = re.compile(r"[-+]?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?")

# For ASCII text, this matches the same words as the default tokenizer of rouge_score, which drops all other
# letters, so that answers in Cyrillic or Chinese would score 0. In scripts written without spaces, each
# character is a word.
_NO_SPACES = "\u0e00-\u0eff\u1000-\u109f\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
WORD = re.compile(rf"[{_NO_SPACES}]|[^\W_{_NO_SPACES}]+")


@dataclass(frozen=True)
class Metric:
    """A way to compare an answer with its reference."""

    label: str
    form: str  # of its value, for `str.format`
    score: Callable[[str, str], float | bool]  # of an answer and its reference
    of_all: Callable[[Sequence[str], Sequence[str]], float] | None = None  # where that is no mean
    uses_pattern: bool = False  # whether it compares what eval.answer_pattern finds
    of_calls: bool = False  # whether it is only of answers that are calls of tools


def normalise(text: str) -> str:
    """Collapses whitespace and cleans up a number: `normalise(" 1,234. ")` is "1234"."""
    folded = " ".join(text.split())
    number = folded.removesuffix(".")
    return number.replace(",", "") if NUMBER.fullmatch(number) else folded


def words(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return WORD.findall(text.lower())


def _same(answer: str, reference: str) -> bool:
    return normalise(answer) == normalise(reference)


def _contains(answer: str, reference: str) -> bool:
    return normalise(reference).casefold() in " ".join(answer.split()).casefold()


def _token_f1(answer: str, reference: str) -> float:
    """As for SQuAD, but with its articles."""
    said, wanted = Counter(words(answer)), Counter(words(reference))
    shared = (said & wanted).total()
    return 2 * shared / (said.total() + wanted.total()) if shared else float(said == wanted)


class _Words:
    """A tokenizer for rouge_score."""

    def tokenize(self, text: str) -> list[str]:
        return words(text)


def _rouge_l(answer: str, reference: str) -> float:
    from rouge_score.rouge_scorer import RougeScorer

    return float(RougeScorer(["rougeL"], tokenizer=_Words()).score(reference, answer)["rougeL"].fmeasure)


def _chrf() -> Any:
    from sacrebleu.metrics import CHRF

    return CHRF()


METRICS = {
    "exact_match": Metric("exact match", "{:.1%}", _same, uses_pattern=True),
    "rouge_l": Metric("ROUGE-L (0 to 1)", "{:.3f}", _rouge_l),
    "chrf": Metric(
        "chrF (0 to 100)",
        "{:.1f}",
        lambda answer, reference: _chrf().sentence_score(answer, [reference]).score,
        of_all=lambda answers, references: _chrf().corpus_score(list(answers), [list(references)]).score,
    ),
    "token_f1": Metric("token F1 (0 to 1)", "{:.3f}", _token_f1),
    "contains": Metric("contains the reference", "{:.1%}", _contains),
    "tool_calls": Metric("tool calls right", "{:.1%}", _same, of_calls=True),
}
DEFAULT = ("exact_match", "rouge_l", "chrf", "tool_calls")
