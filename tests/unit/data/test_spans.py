import random
from dataclasses import dataclass

import numpy as np
import pytest
from tokenizers import AddedToken, normalizers, processors

from sft_play.data.spans import Pieces, find_tokens, pieces_of, tokens_in

SEED = 1127
WORDS = [
    "What",
    " is",
    " two",
    "  ",
    " ",
    "\n",
    "<|im_end|>",
    "<|im_start|>",
    "[INST]",
    "é",
    "日本",
    "🙂",
    "x\t",
    "?",
]


@dataclass
class Offsets:
    """What an encoding of `tokenizers` says of the place of each token."""

    offsets: list[tuple[int, int]]

    def __len__(self):
        return len(self.offsets)

    def token_to_chars(self, token):
        return self.offsets[token]


def test_a_token_across_the_edge_of_an_answer_is_in_it():
    encoding = Offsets([(0, 2), (2, 8), (8, 9), (9, 9)])
    assert tokens_in(encoding, (3, 9)) == (1, 3)
    assert tokens_in(encoding, (9, 12)) == (3, 4)  # a token of no width
    assert tokens_in(encoding, (0, 1)) == (0, 1)
    assert tokens_in(Offsets([]), (0, 1)) == (0, 0)


def drawn_texts(rows: int):
    """Random texts, and spans in them: some beyond their end, as of texts that were cut."""
    rng = random.Random(SEED)
    print("seed", SEED)
    texts = ["".join(rng.choices(WORDS, k=rng.randrange(1, 30))) for _ in range(rows)]
    edges = [sorted(rng.sample(range(len(text) + 3), min(4, len(text) + 3) // 2 * 2)) for text in texts]
    return ["", *texts], [(), *(list(zip(each[::2], each[1::2], strict=True)) for each in edges)]


def every_token(tokenizer, texts, spans):
    """The ids of each text, and for each span the tokens that have a character in it, one by one."""
    batch = tokenizer(texts, add_special_tokens=False)
    for encoding, wanted in zip(batch.encodings, spans, strict=True):
        yield (
            encoding.ids,
            [
                [
                    token
                    for token, (begin, end) in enumerate(encoding.offsets)
                    if begin < last and (end > first if end > begin else begin >= first)
                ]
                for first, last in wanted
            ],
        )


def check(tokenizer, pieces: Pieces | None):
    texts, spans = drawn_texts(300)
    found = find_tokens(tokenizer, pieces, texts, spans)
    for (ids, tokens), (own, expected) in zip(found, every_token(tokenizer, texts, spans), strict=True):
        assert ids.dtype == np.int32
        assert ids.tolist() == own
        assert [list(range(len(ids)))[first:last] for first, last in tokens] == expected


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("change", [None, "normalizer", "added"])
def test_the_tokens_of_spans_are_those_that_offsets_say(raw_tokenizer, make_tokenizer, quick, change):
    raw = type(raw_tokenizer).from_str(raw_tokenizer.to_str())
    if change == "normalizer":  # texts with these letters are not spelled by their tokens
        raw.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.Replace("?", " ?")])
    if change == "added":  # takes the spaces around it, which no token then spells
        raw.add_tokens([AddedToken("two", lstrip=True, rstrip=True), AddedToken("日", normalized=False)])
    tokenizer = make_tokenizer(raw=raw)
    check(tokenizer, pieces_of(tokenizer) if quick else None)


def test_bytes_say_where_spaces_are_whatever_offsets_leave_out(byte_tokenizer, make_tokenizer):
    """Llama 3's offsets leave out the spaces of a token; those in an answer are learned in any case."""
    plain = make_tokenizer()
    raw = type(byte_tokenizer).from_str(byte_tokenizer.to_str())
    raw.post_processor = processors.ByteLevel(trim_offsets=True)
    trimmed = make_tokenizer(raw=raw)
    texts, spans = drawn_texts(300)
    assert plain(texts[1]).encodings[0].offsets != trimmed(texts[1]).encodings[0].offsets
    for one, other in zip(
        find_tokens(plain, pieces_of(plain), texts, spans),
        find_tokens(trimmed, pieces_of(trimmed), texts, spans),
        strict=True,
    ):
        assert one[0].tolist() == other[0].tolist()
        assert one[1] == other[1]


def test_only_byte_level_vocabularies_have_pieces(raw_tokenizer, make_tokenizer):
    tokenizer = make_tokenizer(raw=raw_tokenizer)
    pieces = pieces_of(tokenizer)
    assert (pieces is None) == ("Metaspace" in str(type(raw_tokenizer.decoder)))
    if pieces:
        ids = tokenizer("Hé, two 日<|im_end|>", add_special_tokens=False)["input_ids"]
        assert b"".join(pieces.spelled[token] for token in ids).decode() == "Hé, two 日<|im_end|>"
        assert pieces.lengths[ids].sum() == len("Hé, two 日<|im_end|>".encode())
