"""data.overlong=split: a conversation or text that is too long as several rows, each within the limit.

A conversation is cut between exchanges, before a turn of the user, and rendered anew: each row begins with
the system message and has as many exchanges as fit. An exchange that is too long by itself, and plain text,
is cut between tokens, unless it has pictures: then it is dropped. Each supervised token carries loss in one
row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from sft_play.data.chat import Chat, supervised_turns
from sft_play.data.tokens import Tokens, encode
from sft_play.parts import IGNORED
from sft_play.rows.formats import Conversation

CONTEXT_SHARE = 4  # of a row of a cut exchange, one in so many tokens repeats what came before


def split_rows(chat: Chat, conversation: Conversation) -> list[Tokens]:
    """The rows of a conversation that is longer than `chat.max_tokens`.

    Raises:
        DataError: as in `encode`.
    """
    limit = chat.max_tokens
    assert limit is not None
    whole = replace(chat, max_tokens=None)
    if conversation.text is not None or chat.supervise == "all":
        rows = encode(whole, [conversation])[0]
        return [piece for row in rows for piece in cut(row, limit, overlaps=False)]
    found: list[Tokens] = []
    for part in _parts(chat, conversation):
        rows = encode(replace(whole, supervise="assistant"), [part])[0]
        for row in rows:
            found += [row] if len(row.input_ids) <= limit else cut(row, limit)
    return [replace(row, part=True) for row in found]


def _parts(chat: Chat, conversation: Conversation) -> Iterator[Conversation]:
    """Parts of whole exchanges, each with as many as fit; those that carry no loss are left out."""
    turns = set(supervised_turns(chat, conversation))
    first, exchanges = _exchanges(conversation)
    one_by_one = [_part(conversation, first, [each], turns) for each in exchanges]
    chat = replace(chat, supervise="assistant")
    encoded = encode(chat, one_by_one)
    lengths, again = [_longest(rows) for rows in encoded], _common(encoded)
    limit, start = chat.max_tokens or 0, 0
    while start < len(exchanges):
        end, tokens = start + 1, lengths[start]
        while end < len(exchanges) and tokens + lengths[end] - again <= limit:
            tokens, end = tokens + lengths[end] - again, end + 1
        part = _part(conversation, first, exchanges[start:end], turns)
        while end > start + 1 and _longest(encode(chat, [part])[0]) > limit:
            end -= 1
            part = _part(conversation, first, exchanges[start:end], turns)
        if any(turn in turns for each in exchanges[start:end] for turn in each):
            yield part
        start = end


def _exchanges(conversation: Conversation) -> tuple[list[int], list[list[int]]]:
    """Indices of the messages before the first turn of the user, and of each exchange from there on."""
    first: list[int] = []
    exchanges: list[list[int]] = []
    for index, message in enumerate(conversation.messages):
        follows = index and conversation.messages[index - 1]["role"] == "user"
        if message["role"] == "user" and not follows:
            exchanges.append([])
        (exchanges[-1] if exchanges else first).append(index)
    return (first, exchanges) if exchanges else ([], [first])


def _part(
    conversation: Conversation, first: Sequence[int], exchanges: Sequence[Sequence[int]], turns: set[int]
) -> Conversation:
    """The conversation of the first messages and these exchanges, with loss on `turns` of the whole."""
    kept = [*first, *(index for exchange in exchanges for index in exchange)]
    messages = [conversation.messages[index] for index in kept]
    untrained = tuple(
        place
        for place, index in enumerate(kept)
        if conversation.messages[index]["role"] == "assistant" and index not in turns
    )
    return replace(conversation, messages=tuple(messages), context=0, untrained=untrained)


def _common(encoded: Sequence[Sequence[Tokens]]) -> int:
    """Tokens that parts begin with alike, which joined ones have once; about, since turns may do too."""
    rows = [rows[0].input_ids for rows in encoded if rows][:2]
    if len(rows) < 2:
        return 0
    shorter = min(map(len, rows))
    same = rows[0][:shorter] == rows[1][:shorter]
    return shorter if same.all() else int(same.argmin())


def _longest(rows: Sequence[Tokens]) -> int:
    """Tokens of the longest row; of one far beyond the limit, of its beginning."""
    return max((len(row.input_ids) for row in rows), default=0)


def cut(row: Tokens, limit: int, *, overlaps: bool = True) -> list[Tokens]:
    """Pieces of a row of at most `limit` tokens, which together have its supervised tokens once each.

    A piece begins with as many earlier tokens as fit, at least a quarter of the limit, which carry no loss in
    it; without `overlaps` with one, from which its first supervised token is predicted. So tokens that no
    supervised one follows are left out.
    """
    context = max(1, limit // CONTEXT_SHARE) if overlaps else 1
    if row.pictures:
        return [row]  # too long, so it is dropped
    supervised = np.flatnonzero(row.labels != IGNORED)
    pieces: list[Tokens] = []
    while len(supervised):
        start = int(supervised[0])  # at least 1: the first token of a row carries no loss
        end = min(int(supervised[-1]) + 1, start + limit - min(start, context))
        begin = max(0, end - limit) if overlaps else start - 1
        labels = row.labels[begin:end].copy()
        labels[: start - begin] = IGNORED
        pieces.append(Tokens(row.input_ids[begin:end], labels, part=True))
        supervised = supervised[supervised >= end]
    return pieces
