"""Rendered conversations and plain text -> token ids and labels: loss on answers, end-of-turn token included.

A text is tokenized as a whole; `spans.py` maps character spans to tokens.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from sft_play.data.boundaries import answer_start, find_in_pieces, is_split
from sft_play.data.chat import (
    HIDDEN_REASONING,
    UNSTOPPED,
    Chat,
    RenderedRow,
    hides_reasoning,
    marked,
    render_rows,
)
from sft_play.data.control_tokens import without_marks
from sft_play.data.limits import limited_renderings
from sft_play.data.spans import Found, find_tokens
from sft_play.data.template import render
from sft_play.errors import DataError
from sft_play.parts import IGNORED
from sft_play.rows.formats import Conversation
from sft_play.vision.expansion import expanded, pictures_in, repeated
from sft_play.vision.types import Picture

CUT_MARGIN = 64  # tokens at the end of a truncated text that may differ from those of the full text


@dataclass(frozen=True)
class Tokens:
    """One tokenized row, int32 [tokens]; IGNORED labels carry no loss, and the first is always IGNORED."""

    input_ids: np.ndarray
    labels: np.ndarray
    truncated: bool = False
    part: bool = False  # of a longer row
    pictures: tuple[Picture, ...] = ()


def encode(
    chat: Chat, conversations: Sequence[Conversation], notes: Counter[str] | None = None
) -> list[list[Tokens]]:
    """The rows of each conversation: one, several if the template rewrites turns, none without an answer.

    `notes` counts conversations with HIDDEN_REASONING, and UNSTOPPED ones.

    Raises:
        DataError: the template cannot render a row, or the answers are not found in the rendered text; names
            the row.
    """
    with limited_renderings():
        rendered = render_rows(chat, conversations)
    for row, rows in zip(conversations, rendered, strict=True):
        rows[:] = [_with_texts_of_pictures(chat, row, each) for each in rows]
    tokens, encoded = iter(_tokenize(chat, list(chain.from_iterable(rendered)))), []
    for row, rows in zip(conversations, rendered, strict=True):
        encoded.append([_with_image_tokens(chat, row.source, next(tokens), each.pictures) for each in rows])
    for index, row in enumerate(conversations):
        if row.text is not None:
            encoded[index] = [tokenize_text(chat, row)]
            encoded[index][0].labels[:1] = IGNORED
    if notes is not None:  # all are valid, so none is counted again by itself
        hidden = (hides_reasoning(chat, *pair) for pair in zip(conversations, rendered, strict=True))
        notes[HIDDEN_REASONING] += sum(hidden)
        notes[UNSTOPPED] += sum(any(row.unstopped for row in rows) for rows in rendered)
    return encoded


def _with_texts_of_pictures(chat: Chat, row: Conversation, rendered: RenderedRow) -> RenderedRow:
    """The rendered row with what the model reads for each of its pictures."""
    pictures = pictures_in(row.messages[: rendered.messages])
    try:
        return expanded(chat.recipe, rendered, pictures)
    except ValueError as problem:
        raise DataError(f"{row.source}: {problem}") from None


def _with_image_tokens(chat: Chat, source: str, row: Tokens, pictures: tuple[Picture, ...] = ()) -> Tokens:
    """The row with as many tokens for each picture as the model needs; of a beginning, for those in it."""
    whole = chat.max_tokens is None or len(row.input_ids) <= chat.max_tokens
    try:
        ids, labels, pictures = repeated(chat.recipe, row.input_ids, row.labels, pictures, whole=whole)
    except ValueError as problem:
        raise DataError(f"{source}: {problem}") from None
    return Tokens(ids, labels, pictures=pictures)


def _beginning(chat: Chat, text: str) -> str:
    """The text; if it is far too long, a beginning that certainly has more than max_tokens tokens.

    Tokenizing a row of several megabytes would take gigabytes of memory, only to drop or truncate it.
    """
    size = 32 * (chat.max_tokens or len(text))
    while size < len(text):
        ids = chat.tokenizer(text[:size], add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) > (chat.max_tokens or 0) + CUT_MARGIN:
            return text[:size]
        size *= 4
    return text


def _tokenize(chat: Chat, rendered: Sequence[RenderedRow]) -> list[Tokens]:
    texts = [_beginning(chat, row.text) for row in rendered]
    rows = []
    for row, text, (ids, learned) in zip(rendered, texts, _find_answers(chat, rendered, texts), strict=True):
        if row.add_eos and len(text) == len(row.text):
            learned.append((len(ids), len(ids) + 1))
            ids = np.append(ids, np.int32(chat.tokenizer.eos_token_id))
        labels = np.full(len(ids), IGNORED, np.int32)
        for start, end in learned:
            labels[start:end] = ids[start:end]
        labels[:1] = IGNORED  # no context precedes a first token, so it cannot be predicted
        rows.append(Tokens(ids, labels))
    return rows


def _find_answers(chat: Chat, rendered: Sequence[RenderedRow], texts: Sequence[str]) -> list[Found]:
    """The tokens of the rows' texts, and those that carry loss: what the model writes after a prompt."""
    spans, queries = [], []
    for row in rendered:
        begins = [answer_start(chat.tokenizer, row.text, start) for start, _ in row.supervised]
        spans.append([(begin, end) for begin, (_, end) in zip(begins, row.supervised, strict=True)])
        queries.append([*spans[-1], *((max(begin - 1, 0), begin) for begin in begins)])
    found = []
    natural = find_tokens(chat.tokenizer, chat.pieces, texts, queries)  # the template writes special tokens
    for row, text, own, (ids, places) in zip(rendered, texts, spans, natural, strict=True):
        learned, before = places[: len(own)], places[len(own) :]
        prompts = {}
        for number, (begin, _) in enumerate(own):
            inside = 0 < begin < len(text)
            if inside and is_split(text, begin, learned[number][0], before[number][1]):
                prompts[begin] = min(row.supervised[number][0], len(text))
        spelled = [span for span in row.spelled if span[1] <= len(text)]
        pieces = find_in_pieces(chat.tokenizer, text, own, prompts, spelled) if prompts or spelled else None
        found.append(pieces or (ids, learned))
    return found


def prompt_ids(chat: Chat, prompt: Conversation) -> list[int]:
    """The tokens of a prompt at inference, up to where the model begins to write its answer, as in training.

    Raises:
        DataError: the chat template rejects the messages, or they have a control token and may have none.
    """
    if chat.controls:
        chat.controls.require_none(prompt)
    if prompt.text is not None:
        return tokenize_text(chat, replace(prompt, ends=False)).input_ids.tolist()
    asked = marked(chat, prompt)
    text, _, spelled = without_marks(render(chat.tokenizer, asked, asked.messages, prompt=True), ())
    row = RenderedRow(text, (), spelled=spelled, messages=len(prompt.messages))
    row = _with_texts_of_pictures(chat, prompt, row)
    text, spelled = row.text, row.spelled
    end = answer_start(chat.tokenizer, text, len(text))
    ids, _ = find_in_pieces(chat.tokenizer, text, (), {end: len(text)}, spelled, end)
    return _with_image_tokens(chat, prompt.source, Tokens(ids, ids), row.pictures).input_ids.tolist()


def tokenize_text(chat: Chat, row: Conversation) -> Tokens:
    """Plain text, with loss on every token, even the first one.

    A document begins as the tokenizer begins a text, and ends with the end token; a section in it does not.
    DataError if it has a token that stands for images.
    """
    eos = chat.tokenizer.eos_token_id
    text = _beginning(chat, str(row.text))
    spelled = chat.controls.in_text(text) if chat.controls else ()
    ids = chat.tokenizer(text, add_special_tokens=row.begins, verbose=False)["input_ids"]
    if spelled:
        opening = _opening(chat) if row.begins else []
        ids = [*opening, *find_in_pieces(chat.tokenizer, text, (), {}, spelled)[0].tolist()]
    closed = ids[-1:] == [eos]
    if row.ends and not closed:
        ids = [*ids, eos]
    elif closed and not row.ends:
        ids = ids[:-1]
    return _with_image_tokens(chat, row.source, Tokens(np.array(ids, np.int32), np.array(ids, np.int32)))


def _opening(chat: Chat) -> list[int]:
    """The tokens that the tokenizer puts before a text."""
    one = chat.tokenizer("a", return_special_tokens_mask=True, verbose=False)
    return one["input_ids"][: one["special_tokens_mask"].index(0)]
