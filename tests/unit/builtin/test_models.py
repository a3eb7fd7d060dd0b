import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sft_play.builtin import models, world


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo's model after 20 of its 400 steps, and how many pages were reported as read."""
    folder = tmp_path_factory.mktemp("demo")
    read = []
    pages = world.diary_pages(0, 20 * models.DEMO_PAGES_PER_STEP)
    before = torch.get_rng_state()
    facts = models.make_demo_model(folder, pages, ["Please send a letter."], seed=0, done=read.append)
    assert torch.equal(torch.get_rng_state(), before), (
        "making a model must not change the caller's random numbers"
    )
    return folder, facts, sum(read), pages


@pytest.mark.thorough
def test_reading_the_diary_teaches_it(demo):
    folder, facts, read, pages = demo
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert read == len(pages)
    assert facts["loss"] < 0.7 * torch.log(torch.tensor(float(len(tokenizer))))


@pytest.mark.thorough
def test_a_model_folder_loads_as_any_other_and_gives_the_same_logits_twice(demo):
    folder, facts, _, _ = demo
    one, two = (AutoModelForCausalLM.from_pretrained(folder) for _ in range(2))
    assert one.num_parameters() == facts["parameters"] < 500_000
    assert one.generation_config.eos_token_id == one.config.eos_token_id
    ids = torch.arange(20)[None]
    assert torch.equal(one(ids).logits, two(ids).logits)


def test_every_word_of_the_world_is_one_token(demo):
    tokenizer = AutoTokenizer.from_pretrained(demo[0])
    for word in [*world.NAMES, *world.CITIES, *world.COLOURS, *world.DAYS, *world.NUMBERS]:
        assert len(tokenizer(f" {word}")["input_ids"]) == 1, word


@pytest.mark.parametrize(
    "text", ["nine white tables", "  two  spaces\n\tand a tab ", "Größe 漢字 🙂", "<|unknown|> | a: b"]
)
def test_decoding_gives_back_what_was_encoded(demo, text):
    tokenizer = AutoTokenizer.from_pretrained(demo[0])
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text and tokenizer.unk_token_id not in ids


def test_the_tokenizer_survives_saving_with_its_special_tokens_and_chat_template(demo):
    tokenizer = AutoTokenizer.from_pretrained(demo[0])
    assert (tokenizer.pad_token, tokenizer.unk_token, tokenizer.eos_token) == (
        models.PAD,
        models.UNKNOWN,
        models.END,
    )
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
    ]
    prompt = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert prompt == "<|system|>s<|end|><|user|>u<|end|><|assistant|>"
    assert whole == f"{prompt}a<|end|>"
    assert len(tokenizer(whole)["input_ids"]) == 9


def test_the_chat_template_has_reasoning_tools_and_calls(demo):
    tokenizer = AutoTokenizer.from_pretrained(demo[0])
    call = {"type": "function", "function": {"name": "stock", "arguments": {"city": "Oslo"}}}
    messages = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
    ]
    whole = tokenizer.apply_chat_template(messages, tools=[{"name": "stock"}], tokenize=False)
    called = '<tool_call>{"name": "stock", "arguments": {"city": "Oslo"}}</tool_call>'
    assert whole == (
        f'<|system|>{{"name": "stock"}}<|end|><|user|>u<|end|><|assistant|><think>r</think>{called}<|end|><|tool|>3<|end|>'
    )


def test_the_tiny_model_is_of_two_to_five_million_parameters(tmp_path):
    texts = [
        f"row {i} costs {i * 7919 % 10007} coins, which {chr(97 + i % 26) * 5} pays" for i in range(6000)
    ]
    facts = models.make_tiny_model(tmp_path, texts, seed=0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert 2e6 < facts["parameters"] == model.num_parameters() < 5e6
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["vocab_size"] == len(AutoTokenizer.from_pretrained(tmp_path)) == models.TINY_VOCABULARY
