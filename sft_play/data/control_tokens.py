"""Control tokens, such as <|im_end|>, that stand in the texts of rows: found, and spelled as ordinary text.

A template renders texts and its own control tokens into one string. So those of the texts are put between two
marks before it does, which are removed afterwards and say which ones are to be spelled.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sft_play.data.spans import Span
from sft_play.errors import DataError
from sft_play.rows.formats import Conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BEGIN, END = "\ufdd0", "\ufdd1"  # no characters: Unicode leaves them to programs, and texts have none
MARKS = re.compile(f"[{BEGIN}{END}]")
IN_TEXTS = "with control tokens in the text"


@dataclass(frozen=True)
class ControlTokens:
    """The control tokens of a tokenizer and its template, and what becomes of those in texts."""

    setting: str  # data.control_tokens: keep, escape or refuse
    pattern: re.Pattern[str]

    @property
    def escapes(self) -> bool:
        """Whether those of texts are spelled as ordinary text."""
        return self.setting == "escape"

    def first_in(self, row: Conversation) -> str | None:
        """The first control token of its texts."""
        search = self.pattern.search
        for text in [row.text or "", *(message["content"] for message in row.messages)]:
            if found := search(text):
                return found[0]
        rest = [{**message, "role": "", "content": ""} for message in row.messages if len(message) > 2]
        texts = _strings([rest, row.tools]) if rest or row.tools else ()
        return next((found[0] for text in texts if (found := search(text))), None)

    def require_none(self, row: Conversation) -> None:
        """Raises a DataError, which names the row, if its texts have a control token and may have none."""
        if self.setting == "refuse" and (token := self.first_in(row)):
            raise DataError(
                f"{row.source}: a text has the control token {token!r}, which data.control_tokens=refuse "
                "forbids. Remove it from the row, or set data.control_tokens to escape, which spells it as "
                "ordinary text, or to keep"
            )

    def in_text(self, text: str) -> tuple[Span, ...]:
        """Where a text without a template, such as a document, has those that are to be spelled."""
        return tuple(found.span() for found in self.pattern.finditer(text)) if self.escapes else ()

    def marked(self, row: Conversation) -> Conversation:
        """The conversation with marks around those of its texts that are to be spelled."""
        if not self.escapes:
            return row
        messages = tuple({**self._mark(message), "role": message["role"]} for message in row.messages)
        return replace(row, messages=messages, tools=self._mark(row.tools))

    def _mark(self, value: object) -> Any:
        if isinstance(value, str):
            return self.pattern.sub(f"{BEGIN}\\g<0>{END}", MARKS.sub("", value))
        if isinstance(value, dict):
            return {key: self._mark(item) for key, item in value.items()}
        return [self._mark(item) for item in value] if isinstance(value, list) else value


def control_tokens(tokenizer: "PreTrainedTokenizerBase", setting: str, question: str | None) -> ControlTokens:
    """The special tokens of a tokenizer, and others that were added to it and stand in a rendered `question`.

    Those are the ones that a template writes around any turn. Tokens that it writes in answers alone, such as
    <think>, and those of model.new_tokens belong into texts.
    """
    added = tokenizer.added_tokens_decoder.values()
    found = {token.content for token in added if token.special or token.content in (question or "")}
    longest_first = sorted(
        (token for token in found if token.strip()), key=lambda token: (-len(token), token)
    )
    return ControlTokens(setting, re.compile("|".join(map(re.escape, longest_first)) or "(?!)"))


def without_marks(text: str, spans: Sequence[Span]) -> tuple[str, tuple[Span, ...], tuple[Span, ...]]:
    """A text that was rendered with marks, and its spans, without them; and where text is to be spelled.

    A mark that a template has parted from its other one is dropped.
    """
    places = [found.start() for found in MARKS.finditer(text)]
    spelled = tuple(
        (begin - number, end - number - 1)
        for number, (begin, end) in enumerate(zip(places, places[1:], strict=False))
        if text[begin] == BEGIN and text[end] == END
    )
    moved = tuple((a - bisect_left(places, a), b - bisect_left(places, b)) for a, b in spans)
    return MARKS.sub("", text), moved, spelled


def _strings(value: object) -> Iterator[str]:
    """All strings in a value of JSON, but for the keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)
