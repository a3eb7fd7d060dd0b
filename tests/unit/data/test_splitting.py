"""data.overlong=split: rows within the limit, in which each supervised token is learned once."""

import random
from dataclasses import replace

import numpy as np
import pytest

from sft_play.config.schema import RunConfig
from sft_play.data.chat import make_chat
from sft_play.data.prepare import prepare
from sft_play.data.splitting import cut, split_rows
from sft_play.data.template import use_template
from sft_play.data.tokens import Tokens, encode
from sft_play.errors import DataError
from sft_play.parts import IGNORED
from sft_play.rows.formats import Conversation

WORDS = ["What", "is", "two", "plus", "three", "five", "four", "Hello", "there", "friend"]
# As Qwen3's, it leaves the reasoning of earlier turns out, so that such turns become rows of their own.
REWRITING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def conversation(seed: int, exchanges: int = 12, words: int = 20, system: bool = True, think: bool = False):
    rng = random.Random(seed)
    text = lambda: " ".join(rng.choices(WORDS, k=rng.randint(1, words)))  # noqa: E731
    messages = [{"role": "system", "content": "Be brief."}] if system else []
    for number in range(exchanges):
        messages.append({"role": "user", "content": f"{number} {text()}"})
        thought = f"<think>{text()}</think>" if think else ""
        messages.append({"role": "assistant", "content": f"{thought}{text()} {number}"})
    return Conversation(tuple(messages), source="rows.jsonl:1")


@pytest.fixture
def chat_of(make_tokenizer):
    def of(limit, template="chatml", supervise="assistant", **settings):
        tokenizer = make_tokenizer(template=None if template in ("chatml", "plain") else template)
        if template in ("chatml", "plain"):
            use_template(tokenizer, template)
        return make_chat(tokenizer, supervise, limit, **settings)

    return of


def learned(rows) -> list[int]:
    """The supervised tokens of all rows, in order."""
    return [int(token) for row in rows for token in row.labels if token != IGNORED]


def whole(chat, row) -> list[Tokens]:
    return encode(replace(chat, max_tokens=None), [row])[0]


@pytest.mark.parametrize("supervise", ["assistant", "last", "all"])
@pytest.mark.parametrize("template", ["chatml", "plain", REWRITING], ids=["chatml", "plain", "rewriting"])
@pytest.mark.parametrize("limit", [8, 33, 150, 400])
def test_rows_are_within_the_limit_and_learn_each_token_once(chat_of, supervise, template, limit):
    chat = chat_of(limit, template, supervise)
    for seed in range(4):
        row = conversation(seed, think=template == REWRITING and supervise != "all", system=seed % 2 == 0)
        rows = split_rows(chat, row)
        assert max(len(one.input_ids) for one in rows) <= limit
        assert all(one.part and one.labels[0] == IGNORED and (one.labels != IGNORED).any() for one in rows)
        same = [one.labels[one.labels != IGNORED] == one.input_ids[one.labels != IGNORED] for one in rows]
        assert all(each.all() for each in same)
        assert learned(rows) == learned(whole(chat, row))


def test_rows_are_whole_exchanges_behind_the_system_message(chat_of):
    chat = chat_of(150)
    rows = split_rows(chat, conversation(0, words=4))
    texts = [chat.tokenizer.decode(row.input_ids) for row in rows]
    assert len(texts) > 2
    for text in texts:
        assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
        assert text.endswith("<|im_end|>") and text.count("<|im_start|>user") == text.count(
            "<|im_start|>assistant"
        )
    # as many as fit: two neighbours would be too long together
    sizes, first = (
        [len(row.input_ids) for row in rows],
        len(chat.tokenizer("<|im_start|>system\nBe brief.<|im_end|>\n")["input_ids"]),
    )
    assert all(one + two - first > 150 - 40 for one, two in zip(sizes, sizes[1:], strict=False))


def test_a_short_answer_to_a_long_question_keeps_as_much_of_it_as_fits(chat_of):
    chat = chat_of(100)
    question = {"role": "user", "content": "two " * 500 + "last?"}
    row = Conversation((question, {"role": "assistant", "content": "four"}))
    (only,) = split_rows(chat, row)
    assert len(only.input_ids) == 100
    assert "last?<|im_end|>\n<|im_start|>assistant\nfour" in chat.tokenizer.decode(only.input_ids)


def test_an_answer_that_is_cut_has_a_quarter_of_the_row_as_context(chat_of):
    chat = chat_of(100)
    row = Conversation(
        ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "five " * 400})
    )
    rows = split_rows(chat, row)
    assert all((one.labels[:25] == IGNORED).all() for one in rows[1:])
    assert learned(rows) == learned(whole(chat, row))


def test_text_is_cut_so_that_one_token_is_seen_twice(chat_of):
    chat = chat_of(50)
    row = Conversation((), text="two plus three " * 60)
    rows, all_of_it = split_rows(chat, row), whole(chat, row)
    assert learned(rows) == learned(all_of_it)
    assert sum(len(one.input_ids) for one in rows) == len(all_of_it[0].input_ids) + len(rows) - 1


def test_turns_that_carry_no_loss_carry_none_in_any_row(chat_of):
    row = replace(conversation(0), untrained=(2, 8))
    chat = chat_of(120)
    rows = split_rows(chat, row)
    assert learned(rows) == learned(whole(chat, row)) != learned(whole(chat, conversation(0)))
    prompt = replace(conversation(1), context=20)
    assert learned(split_rows(chat, prompt)) == learned(whole(chat, prompt))


@pytest.mark.parametrize("limit", [2, 3, 5, 64])
@pytest.mark.parametrize("overlaps", [True, False])
def test_any_labels_are_cut_into_pieces_that_have_each_once(limit, overlaps):
    rng = np.random.default_rng(limit)
    for _ in range(30):
        ids = np.arange(rng.integers(2, 300), dtype=np.int32)
        labels = np.where(rng.random(len(ids)) < rng.random(), ids, IGNORED)
        labels[0] = IGNORED
        pieces = cut(Tokens(ids, labels), limit, overlaps=overlaps)
        assert learned(pieces) == labels[labels != IGNORED].tolist()
        assert all(len(piece.input_ids) <= limit and piece.labels[0] == IGNORED for piece in pieces)


def test_parts_are_counted_and_a_conversation_stays_in_one_split(
    write_rows, make_tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    talks = [
        {"messages": list(conversation(seed, exchanges=2 + 10 * (seed % 4 == 0)).messages)}
        for seed in range(40)
    ]
    path = str(write_rows(talks))

    def prepared(overlong):
        tree = {
            "model": {"name": "toy", "max_seq_len": 400},
            "data": {"train_path": path, "overlong": overlong},
        }
        return prepare(RunConfig.model_validate(tree), make_tokenizer(), progress=False).stats

    split, dropped = prepared("split"), prepared("drop")
    longer = sum(dropped[name]["dropped"].get("longer than 400 tokens", 0) for name in ("train",))
    assert longer > 5 and split["train"]["dropped"] == {}
    assert split["train"]["parts"] + split["val"]["parts"] >= 2 * longer
    assert split["train"]["conversations"] + split["val"]["conversations"] == 40
    assert not any("rewrites" in warning for warning in split["warnings"])
    with pytest.raises(DataError, match="set data.overlong to split, truncate or drop"):
        prepared("error")
