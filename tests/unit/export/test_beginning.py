"""Whoever runs a GGUF file gives the model the tokens that it saw in training, from the first one on.

After llama.cpp (`common_chat_templates_apply`, `llama_vocab::tokenize`) and Ollama (`Vocabulary.addSpecials`),
read on 2026-11-28: with `add_bos_token` both put the token that begins a text before what they tokenize, and
only llama.cpp first takes it off a chat prompt that begins with it.
"""

from dataclasses import replace

import pytest

from sft_play.data.chat import make_chat
from sft_play.data.tokens import encode
from sft_play.export.ollama import template_in_go
from sft_play.export.vocabulary import Beginning, beginning, describe
from sft_play.rows.formats import Conversation
from sft_play.rows.messages import alternating
from tests.unit.export import folders
from tests.unit.export.test_ollama import KNOWN, in_go

gguf = pytest.importorskip("gguf", reason="needs gguf (pip install gguf)")

QUESTIONS = ["the quick", "fox", "lazy"]


def gemma():
    """The tokenizer and the template each begin with <bos>."""
    return folders.piece_tokenizer()


def smollm2():
    """<|im_start|> is the token that begins a text, which only the template writes."""
    tokenizer = folders.byte_tokenizer()
    tokenizer.bos_token = "<|im_start|>"
    return tokenizer


def base_llama():
    """Only the tokenizer adds <bos>: the template was chosen for a base that has none."""
    tokenizer = folders.piece_tokenizer()
    tokenizer.chat_template = folders.GEMMA.replace("{{ bos_token }}", "")
    return tokenizer


def qwen():
    """No token begins a text."""
    return folders.byte_tokenizer()


KINDS = {
    gemma: Beginning(of_text=True, of_chat=True),
    smollm2: Beginning(of_text=False, of_chat=True),
    base_llama: Beginning(of_text=True, of_chat=False),
    qwen: Beginning(of_text=False, of_chat=False),
}
every_kind = pytest.mark.parametrize("make", KINDS)


class File:
    """What a GGUF file says of a tokenizer, and the prompts that are made by it."""

    def __init__(self, tokenizer, *, only_text=False):
        self.tokenizer = tokenizer
        self.adds_bos = beginning(tokenizer).added(only_text=only_text)
        writer = gguf.GGUFWriter(None, "llama")
        describe(writer, tokenizer, len(tokenizer), adds_bos=self.adds_bos)
        said = {key: value.value for key, value in writer.kv_data[0].items()}
        assert said["tokenizer.ggml.add_bos_token"] is self.adds_bos
        self.template, self.bos = said["tokenizer.chat_template"], said.get("tokenizer.ggml.bos_token_id")

    def text(self, text):
        """A prompt that is no chat, for both."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [self.bos, *ids] if self.adds_bos else ids

    def chat(self, messages):
        """llama.cpp's prompt."""
        text = self.tokenizer.apply_chat_template(
            messages, chat_template=self.template, tokenize=False, add_generation_prompt=True
        )
        return self.text(text.removeprefix(self.tokenizer.bos_token) if self.adds_bos else text)

    def chat_of_ollama(self, messages):
        """Ollama's, by the template of our Modelfile."""
        return self.text(in_go(template_in_go(self.tokenizer, adds_bos=self.adds_bos), messages))


def trained_on(tokenizer, conversation):
    """The tokens of a row in training."""
    [[row]] = encode(make_chat(tokenizer, "assistant", None), [conversation])
    return row.input_ids.tolist()


@every_kind
def test_where_the_first_token_comes_from_is_found(make):
    assert beginning(make()) == KINDS[make]


@every_kind
@pytest.mark.parametrize("turns", [1, 3])
def test_chats_begin_as_in_training(make, turns):
    tokenizer = make()
    messages = alternating(*QUESTIONS[:turns])
    row = trained_on(tokenizer, Conversation(alternating(*QUESTIONS[:turns], "dog")))
    file = File(tokenizer)
    prompt = file.chat(list(messages))
    assert row[: len(prompt)] == prompt and len(row) > len(prompt)


@every_kind
@pytest.mark.parametrize("name", KNOWN)
def test_ollama_begins_chats_of_shipped_templates_as_llama_cpp_does(make, name):
    tokenizer = make()
    tokenizer.chat_template = KNOWN[name]
    file, messages = File(tokenizer), list(alternating(*QUESTIONS))
    assert file.chat_of_ollama(messages) == file.chat(messages)


@every_kind
def test_texts_begin_as_in_training(make):
    tokenizer = make()
    document = Conversation((), text=QUESTIONS[0])
    row = trained_on(tokenizer, document)
    file = File(tokenizer, only_text=True)
    assert [*file.text(QUESTIONS[0]), tokenizer.eos_token_id] == row
    middle = trained_on(tokenizer, replace(document, begins=False))
    assert (row != middle) is KINDS[make].of_text  # else the test could not fail


def test_one_flag_is_right_for_what_was_trained():
    assert not Beginning(of_text=True, of_chat=False).added(only_text=False)
    assert Beginning(of_text=True, of_chat=False).added(only_text=True)
