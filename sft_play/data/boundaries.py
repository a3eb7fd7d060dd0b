"""Where a prompt ends and an answer begins, in tokens: the same in training and at inference.

Tokenizers join characters across that boundary: most of them a space with the next word, some a newline with
more newlines. What a token of a usual answer begins with is left to the answer, so prompts at inference end
before it. Where a training row has joined anything else, its text is tokenized in two pieces.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from sft_play.data.spans import Found, Span, find_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LETTERS = "aistAIST"  # as answers begin
LONGEST_TAIL = 256  # characters that are looked at
CONTEXT = 8  # characters before the blanks at the end of a prompt that decide how these are tokenized


def answer_start(tokenizer: "PreTrainedTokenizerBase", text: str, start: int) -> int:
    """Where a model begins to write an answer at `start` of a text: before white space that joins with it."""
    return start - _joining(tokenizer, _tail(text[max(0, start - LONGEST_TAIL) : start]))[0]


def _tail(prompt: str) -> str:
    """The end of a prompt: the same for all prompts of most templates."""
    return prompt[max(0, len(prompt.rstrip()) - CONTEXT) :]


@lru_cache(maxsize=1024)
def _joining(tokenizer: "PreTrainedTokenizerBase", tail: str) -> tuple[int, str]:
    """How many of the blanks that end a prompt are in one token with a letter after them, and that letter.

    It is the one that most are in a token with; "" if the prompt ends with no blank.
    """
    blanks = len(tail) - len(tail.rstrip())
    if not blanks:
        return 0, ""
    probes = tokenizer([tail + letter for letter in LETTERS], add_special_tokens=False, verbose=False)
    found = [
        (min(_joined(tokenizer, ids, letter), blanks), letter)
        for ids, letter in zip(probes["input_ids"], LETTERS, strict=True)
    ]
    return max(found, key=itemgetter(0)) if max(found)[0] >= 0 else (0, "")


def _joined(tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int], letter: str) -> int:
    """How many characters are in one token with the letter that ends a text; -1 if it is no token's last."""
    last = tokenizer.convert_ids_to_tokens([ids[-1]])[0] if ids else ""
    return len(last) - 1 if last.endswith(letter) else -1


def is_split(text: str, start: int, first: int, before: int) -> bool:
    """Whether the natural tokens of a text are others at the start of an answer than those of its prompt.

    `first` is the answer's first token, and `before` the one after that of the character before the answer.
    """
    return before > first or (text[start - 1 : start].isspace() and text[start : start + 1].isspace())


def find_in_pieces(
    tokenizer: "PreTrainedTokenizerBase",
    text: str,
    spans: Sequence[Span],
    prompts: Mapping[int, int],
    spelled: Sequence[Span] = (),
    until: int | None = None,
) -> Found:
    """As `find_tokens`, of a text that is tokenized in pieces; a span may have become several.

    Args:
        tokenizer: a fast one.
        text: as rendered.
        spans: of characters.
        prompts: where answers begin -> where their prompts end, in characters: not before that.
        spelled: spans of control tokens that are ordinary text.
        until: where the last piece ends; None for the end of the text.
    """
    last = len(text) if until is None else until
    edges = sorted({0, last, *prompts, *(edge for span in spelled for edge in span)})
    ids, found = np.zeros(0, np.int32), []
    for start, stop in pairwise(edges):
        inside = [(max(a, start) - start, min(b, stop) - start) for a, b in spans if a < stop and b > start]
        if (start, stop) in spelled:
            more = np.array(spell(tokenizer, text[start:stop]), np.int32)
            places = [(0, len(more)) for _ in inside]
        else:
            blanks = text[stop : prompts[stop]] if stop in prompts else None
            more, places = _piece(tokenizer, text[start:stop], inside, blanks, inner=start > 0)
        found += [(first + len(ids), last + len(ids)) for first, last in places]
        ids = np.concatenate([ids, more])
    return ids, found


def _piece(
    tokenizer: "PreTrainedTokenizerBase", text: str, spans: Sequence[Span], left: str | None, *, inner: bool
) -> Found:
    """A piece of a text: `inner` if another one is before it.

    It has the tokens that it has before an answer, to which the blanks `left` after it are left; None if no
    answer follows.
    """
    lead = _lead(tokenizer, text) if inner else ""
    first = len(_ids(tokenizer, lead))
    moved = [(start + len(lead), end + len(lead)) for start, end in spans]
    found: Found | None = None
    if left is not None and (letter := _joining(tokenizer, _tail(text + left))[1]):
        ((ids, places),) = find_tokens(tokenizer, None, [lead + text + left + letter], [moved])
        if _joined(tokenizer, ids.tolist(), letter) == len(left):  # else, in this text, it joins with more
            found = ids[:-1], places
    ids, places = found or find_tokens(tokenizer, None, [lead + text], [moved])[0]
    return ids[first:], [(max(a, first) - first, min(b, len(ids)) - first) for a, b in places]


def _lead(tokenizer: "PreTrainedTokenizerBase", text: str) -> str:
    """What to put before an inner piece, since some tokenizers begin each text with a space of their own."""
    for lead in ("a", "\n") if text[:1].isspace() else ("\n", "a"):
        own = _ids(tokenizer, lead)
        if _ids(tokenizer, lead + text)[: len(own)] == own:
            return lead
    return ""


def spell(tokenizer: "PreTrainedTokenizerBase", token: str) -> list[int]:
    """The tokens of the text of a control token within another text, none of which is that token itself."""
    lead = _lead(tokenizer, token[:1])
    ids = _ids(tokenizer, lead + token, split_special_tokens=True)[len(_ids(tokenizer, lead)) :]
    if len(token) == 1 or tokenizer.convert_tokens_to_ids(token) not in ids:
        return ids
    return spell(tokenizer, token[:1]) + spell(tokenizer, token[1:])  # it is not special, or a whole word


def _ids(tokenizer: "PreTrainedTokenizerBase", text: str, **options: bool) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False, **options)["input_ids"])
