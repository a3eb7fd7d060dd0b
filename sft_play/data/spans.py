"""Texts -> token ids, and which of these tokens are in given spans of characters.

Tokenizing takes about a tenth less time without offsets. With a byte-level vocabulary, as GPT-2 and most
models since have, the bytes that the tokens spell say where each of them is. Offsets are needed where tokens
do not spell the text, since the tokenizer normalized it, and with other vocabularies.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]  # the first, and the one after the last
# ids of a text, int32 [tokens], and the tokens that are in each of its spans
Found = tuple[np.ndarray, list[Span]]


@dataclass(frozen=True)
class Pieces:
    """What each token id of a byte-level vocabulary spells."""

    spelled: list[bytes]
    lengths: np.ndarray  # in bytes, [vocabulary]


def pieces_of(tokenizer: "PreTrainedTokenizerBase") -> Pieces | None:
    """What the tokens of a fast tokenizer spell; None if its vocabulary is not byte-level."""
    from tokenizers.decoders import ByteLevel
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    backend = tokenizer.backend_tokenizer
    if not isinstance(backend.decoder, ByteLevel):
        return None
    byte_of = {ord(letter): byte for byte, letter in bytes_to_unicode().items()}
    vocabulary = backend.get_vocab(with_added_tokens=False)
    added_tokens = backend.get_added_tokens_decoder()
    # all at once: one by one takes several times as long
    together = "\uffff".join(vocabulary).translate(byte_of).split("\uffff")
    spelled = [b""] * (1 + max([*vocabulary.values(), *added_tokens]))
    for token_id, letters in zip(vocabulary.values(), together, strict=True):
        spelled[token_id] = letters.encode("latin-1", "replace")
    for token_id, added in added_tokens.items():
        spelled[token_id] = added.content.encode()
    return Pieces(spelled, np.array(list(map(len, spelled))))


def find_tokens(
    tokenizer: "PreTrainedTokenizerBase",
    pieces: Pieces | None,
    texts: Sequence[str],
    spans: Sequence[Sequence[Span]],
) -> list[Found]:
    """Tokenizes texts as they are, without special tokens, and finds the tokens in each text's spans.

    A token is in a span if one of its characters is: one that begins in the prompt's last space and ends in
    the answer's first word is in the answer. With `pieces`, those of `pieces_of`, it takes less time.
    """
    found: list[Found | None] = [None] * len(texts)
    if pieces is not None:
        found = _by_bytes(tokenizer, pieces, texts, spans)
    rest = [index for index, one in enumerate(found) if one is None]
    if rest:
        left = [texts[index] for index in rest]
        others = _by_offsets(tokenizer, left, [spans[index] for index in rest])
        for index, one in zip(rest, others, strict=True):
            found[index] = one
    return found  # type: ignore[return-value]  # none is missing now


def _by_bytes(
    tokenizer: "PreTrainedTokenizerBase",
    pieces: Pieces,
    texts: Sequence[str],
    spans: Sequence[Sequence[Span]],
) -> list[Found | None]:
    """As `find_tokens`; None for a text that its tokens do not spell."""
    backend = tokenizer.backend_tokenizer
    backend.no_padding()  # set by an earlier call, as truncation and the treatment of added tokens
    backend.no_truncation()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    found: list[Found | None] = []
    encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
    for encoding, text, wanted in zip(encodings, texts, spans, strict=True):
        listed, whole = encoding.ids, text.encode()
        if b"".join([pieces.spelled[token] for token in listed]) != whole:
            found.append(None)
            continue
        if len(whole) > len(text):
            wanted = [(len(text[:start].encode()), len(text[:end].encode())) for start, end in wanted]
        ids = np.fromiter(listed, np.int32, len(listed))
        ends = pieces.lengths[ids].cumsum()
        tokens = [(bisect_right(ends, start), bisect_left(ends, end) + 1) for start, end in wanted]
        found.append((ids, tokens))
    return found


def _by_offsets(
    tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], spans: Sequence[Sequence[Span]]
) -> list[Found]:
    """As `find_tokens`, for any tokenizer."""
    batch = tokenizer(
        texts,
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    rows = zip(batch["input_ids"], batch.encodings or (), spans, strict=True)
    return [
        (np.array(ids, np.int32), [tokens_in(encoding, span) for span in wanted])
        for ids, encoding, wanted in rows
    ]


def tokens_in(encoding: "Encoding", span: Span) -> Span:
    """The tokens of an encoding that have a character in a span.

    Tokens of no width (a tokenizer may emit some before a word) are included if their position is in it.
    Only the offsets that the search meets become Python objects. Example: "Hi", " there", "!" of "Hi there!"
    and the span (3, 9) give (1, 3).
    """
    start, end = span

    def begin_of(token: int) -> int:
        return encoding.token_to_chars(token)[0]  # type: ignore[index]  # None is for a token that is not there

    def end_of(token: int) -> int:
        return encoding.token_to_chars(token)[1]  # type: ignore[index]

    places = range(len(encoding))
    first = bisect_right(places, start, key=end_of)
    while first and begin_of(first - 1) == end_of(first - 1) == start:
        first -= 1
    return first, bisect_left(places, end, key=begin_of)
