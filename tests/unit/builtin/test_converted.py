"""A GGUF file that our own export writes becomes the folder again that it was made of."""

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoTokenizer

from sft_play.builtin.converted import make_smollm2
from sft_play.builtin.models import byte_level_tokenizer, random_llama
from sft_play.export.gguf_file import Source, write
from tests.packages import needs_transformers

pytest.importorskip("gguf", reason="needs gguf (pip install gguf)")

TEXT = "Order 12345 is on its way, 7 lamps\n"


@needs_transformers("5.18")  # reads tokenizers without a token to begin with
def test_weights_and_tokens_are_those_of_the_model_that_the_file_was_made_of(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    tokenizer = byte_level_tokenizer([TEXT * 20], 300, 64)
    digits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(digits)
    model = random_llama(tokenizer, hidden=32, layers=1, heads=2, intermediate=32, positions=64, seed=0)
    model.to(torch.bfloat16).save_pretrained(first)
    tokenizer.save_pretrained(first)
    source = Source(first, AutoConfig.from_pretrained(first), tokenizer, "smollm", False)
    write(tmp_path / "model.gguf", source, "bf16")

    second.mkdir()
    assert make_smollm2(second, tmp_path / "model.gguf") == {"parameters": model.num_parameters()}
    was, found = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert was.keys() == found.keys() and all(torch.equal(was[name], found[name]) for name in was)
    again = AutoTokenizer.from_pretrained(second)
    assert again(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]
    assert [again.decode([token]) for token in again("12345")["input_ids"]] == list("12345")
    assert again.chat_template == tokenizer.chat_template and again.eos_token == tokenizer.eos_token
    assert "Apache" in (second / "README.md").read_text()
    assert (
        str(tmp_path)
        not in (second / "tokenizer_config.json").read_text() + (second / "config.json").read_text()
    )
