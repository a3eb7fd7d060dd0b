import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from sft_play import attention
from sft_play.errors import ConfigError
from sft_play.train.verify import check_isolation

CONFIG = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=64
)
CPU = torch.device("cpu")


def build():
    attention.register()
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG, attn_implementation=attention.NAME)


def test_packed_rows_that_are_kept_apart_pass():
    model = build()
    check_isolation(model, CPU)
    assert model.training


def test_an_architecture_that_loses_the_lengths_on_the_way_is_refused():
    model = build()
    for layer in model.model.layers:
        inner = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, _inner=inner, sequence_lengths=None, **kwargs: _inner(*args, **kwargs)
    with pytest.raises(ConfigError, match="packed rows see each other"):
        check_isolation(model, CPU)
