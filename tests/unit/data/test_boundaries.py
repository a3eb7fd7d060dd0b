"""Rows in which tokens could go across the boundary between a prompt and its answer."""

from dataclasses import replace

import numpy as np
import pytest

from sft_play.data.boundaries import answer_start
from sft_play.data.chat import make_chat
from sft_play.data.spans import pieces_of
from sft_play.data.tokens import encode, prompt_ids
from sft_play.parts import IGNORED
from sft_play.rows.formats import Conversation
from sft_play.rows.messages import alternating
from tests.unit.data.test_chat import learned_texts

# "\nFour", "\n\n" and " a" become tokens
TEXTS = ["assistant\nFour.", "assistant\n\nFour.", "\n\n\n", "assistant: It is.", "two", "a a"]
ANSWERS = ["Four.", "It is.", "4", "\nFour.", "\n\n\nIt", " It", "  It", "\tIt", " \n It", "!"]
PROMPTS = {
    "newline": "assistant\n",
    "newlines": "assistant\n\n",
    "blank": "assistant: ",
    "blanks": "assistant:  ",
    "colon": "assistant:",
    "newline and blank": "assistant:\n ",
    "control token": "<|im_start|>",
}


def template(prompt: str) -> str:
    begin = "{{ " + repr(prompt) + " }}"
    return (
        "{% for m in messages %}{% if m.role == 'user' %}Q: {{ m.content }}{{ '\\n' }}"
        f"{{% else %}}{begin}{{{{ m.content + '<|im_end|>' + '\\n' }}}}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{begin}{{% endif %}}"
    )


@pytest.fixture(scope="module", params=["bytes", "metaspace"])
def joining(request):
    """A tokenizer that joins newlines with newlines, and (without a rule against it) with words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE())
    alphabet = list("assistantFourQ4It:.!\n\t ")
    if request.param == "bytes":
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        raw.decoder, alphabet = decoders.ByteLevel(), pre_tokenizers.ByteLevel.alphabet()
    else:
        raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        raw.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<pad>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    raw.train_from_iterator(TEXTS * 5, trainer)
    return raw


@pytest.mark.parametrize("prompt", PROMPTS)
def test_what_comes_before_the_first_learned_token_is_the_prompt_at_inference(
    make_tokenizer, joining, prompt
):
    tokenizer = make_tokenizer(template(PROMPTS[prompt]), joining)
    chat = make_chat(tokenizer, "assistant")
    for answer in ANSWERS:
        messages = alternating("It", answer)
        (row,) = encode(chat, [Conversation(messages)])[0]
        learned = np.flatnonzero(row.labels != IGNORED)
        asked = prompt_ids(chat, Conversation(messages[:1]))
        assert row.input_ids[: learned[0]].tolist() == asked, answer
        assert row.labels[learned].tolist() == row.input_ids[learned[0] :].tolist()
        assert tokenizer.decode(row.input_ids[learned]).strip() == f"{answer.strip()}<|im_end|>"


@pytest.mark.parametrize("prompt", PROMPTS)
def test_each_answer_of_a_longer_row_is_learned_whole(make_tokenizer, joining, prompt):
    tokenizer = make_tokenizer(template(PROMPTS[prompt]), joining)
    for answer in ANSWERS:
        turns = alternating("It", answer, "Four", "Four.", "It", answer)
        (row,) = encode(make_chat(tokenizer, "assistant"), [Conversation(turns)])[0]
        (natural,) = encode(make_chat(tokenizer, "all"), [Conversation(turns)])[0]
        assert tokenizer.decode(row.input_ids) == tokenizer.decode(natural.input_ids), answer
        said = [turn["content"] for turn in turns if turn["role"] == "assistant"]
        assert [text.strip() for text in learned_texts(tokenizer, row)] == [
            f"{text.strip()}<|im_end|>" for text in said
        ]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_tokens_by_bytes_are_divided_like_those_by_offsets(make_tokenizer, joining, prompt):
    tokenizer = make_tokenizer(template(PROMPTS[prompt]), joining)
    chat = make_chat(tokenizer, "assistant")
    by_bytes = replace(chat, pieces=pieces_of(tokenizer))
    rows = [Conversation(alternating("It", answer, "Four", answer)) for answer in ANSWERS]
    for (one,), (other,) in zip(encode(chat, rows), encode(by_bytes, rows), strict=True):
        assert one.input_ids.tolist() == other.input_ids.tolist()
        assert one.labels.tolist() == other.labels.tolist()


def test_a_row_without_such_tokens_is_tokenized_as_one_text(make_tokenizer, joining):
    tokenizer = make_tokenizer(template("assistant\n\n"), joining)
    (row,) = encode(make_chat(tokenizer, "assistant"), [Conversation(alternating("It", "4"))])[0]
    assert row.input_ids.tolist() == tokenizer("Q: It\nassistant\n\n4<|im_end|>")["input_ids"]


def test_white_space_that_joins_with_a_letter_is_left_to_the_answer(make_tokenizer, joining):
    tokenizer = make_tokenizer(None, joining)
    assert answer_start(tokenizer, "assistant: It", 11) == 10
    assert answer_start(tokenizer, "assistant:It", 10) == 10
    assert answer_start(tokenizer, "", 0) == 0
