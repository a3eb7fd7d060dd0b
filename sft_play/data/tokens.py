"""Rendered conversations and plain text -> token ids and labels: loss on answers, end-of-turn token included.

A text is tokenized once, as a whole, and token offsets map character spans to tokens.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, compress, islice, zip_longest

import numpy as np

from sft_play.data.chat import HIDDEN_REASONING, Chat, RenderedRow, Span, hides_reasoning, render_rows
from sft_play.data.formats import Conversation
from sft_play.data.limits import limited_renderings

IGNORED = -100
CUT_MARGIN = 64  # tokens at the end of a truncated text that may differ from those of the full text


@dataclass(frozen=True)
class Tokens:
    """One tokenized row, int32 [tokens]; IGNORED labels carry no loss, and the first is always IGNORED."""

    input_ids: np.ndarray
    labels: np.ndarray
    truncated: bool = False
    part: bool = False  # of a longer row


def encode(
    chat: Chat, conversations: Sequence[Conversation], notes: Counter[str] | None = None
) -> list[list[Tokens]]:
    """The rows of each conversation: one, several if the template rewrites turns, none without an answer.

    `notes` counts conversations with HIDDEN_REASONING.

    Raises:
        DataError: the template cannot render a row, or the answers are not found in the rendered text; names
            the row.
    """
    with limited_renderings():
        rendered = render_rows(chat, conversations)
    if notes is not None:
        hidden = (hides_reasoning(chat, *pair) for pair in zip(conversations, rendered, strict=True))
        notes[HIDDEN_REASONING] += sum(hidden)
    tokens = iter(_tokenize(chat, list(chain.from_iterable(rendered))))
    encoded = [list(islice(tokens, len(rows))) for rows in rendered]
    for index, row in enumerate(conversations):
        if row.text is not None:
            encoded[index] = [tokenize_text(chat, row)]
            encoded[index][0].labels[:1] = IGNORED
    return encoded


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
    if not rendered:
        return []
    texts = [_beginning(chat, row.text) for row in rendered]
    batch = chat.tokenizer(
        texts,
        add_special_tokens=False,  # the template writes them
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    ids = batch["input_ids"]
    closed = [row.add_eos and len(text) == len(row.text) for row, text in zip(rendered, texts, strict=True)]
    for row in compress(ids, closed):
        row.append(chat.tokenizer.eos_token_id)
    # numpy is slow on small arrays and on pairs, and the garbage collector on pairs that are kept
    lengths = np.array([len(row) for row in ids])
    tokens = np.fromiter(chain.from_iterable(ids), np.int32, lengths.sum())
    pairs = (
        chain(encoding.offsets, row.supervised[-1:] if add_eos else ())  # an added token carries loss
        for row, encoding, add_eos in zip(rendered, batch.encodings or (), closed, strict=True)
    )
    offsets = np.fromiter(chain.from_iterable(chain.from_iterable(pairs)), np.int64, 2 * len(tokens))
    mask = label_mask(offsets, lengths, [row.supervised for row in rendered])
    ends = lengths.cumsum()
    mask[(ends - lengths)[lengths > 0]] = (
        False  # no context precedes a first token, so it cannot be predicted
    )
    labels = np.where(mask, tokens, np.int32(IGNORED))
    return list(map(Tokens, np.split(tokens, ends[:-1]), np.split(labels, ends[:-1])))


def label_mask(offsets: np.ndarray, lengths: np.ndarray, spans: Sequence[Sequence[Span]]) -> np.ndarray:
    """The loss mask of rows end to end, bool [tokens]: True for tokens with a character in a span of the row.

    A token that begins in the prompt's last space and ends in the answer's first word is included. Zero-width
    tokens (a tokenizer may emit some before a word) are included if their position is in a span.

    `offsets` are the first and last character of each token, [tokens, 2] or flat, `lengths` the tokens of
    each row. Example: tokens "Hi", " there", "!" of "Hi there!" with span (3, 9) give [False, True, True].
    """
    begins, ends = offsets.reshape(-1, 2).T
    mask = np.zeros(len(begins), bool)
    for each in zip_longest(*spans, fillvalue=(0, 0)):  # one span of every row; this one is that of no token
        start, end = np.repeat(np.array(each), lengths, axis=0).T
        mask |= (begins < end) & np.where(ends > begins, ends > start, begins >= start)
    return mask


def tokenize_text(chat: Chat, row: Conversation) -> Tokens:
    """Plain text, with loss on every token, even the first one.

    A document begins as the tokenizer begins a text, and ends with the end token; a section in it does not.
    """
    eos = chat.tokenizer.eos_token_id
    text = _beginning(chat, str(row.text))
    ids = chat.tokenizer(text, add_special_tokens=row.begins, verbose=False)["input_ids"]
    closed = ids[-1:] == [eos]
    if row.ends and not closed:
        ids = [*ids, eos]
    elif closed and not row.ends:
        ids = ids[:-1]
    return Tokens(np.array(ids, np.int32), np.array(ids, np.int32))
