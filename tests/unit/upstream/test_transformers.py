"""Weights that files call otherwise than models do are loaded into a model that goes on."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen3MoeConfig

from sft_play.upstream.transformers import loaded_as_saved
from tests.vision_models import config_of, random_model

MOE = dict(
    hidden_size=32, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    num_experts=4, vocab_size=64, head_dim=16,
)  # fmt: skip


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_moe"])
def test_a_model_takes_weights_by_the_names_that_its_files_have(kind, tmp_path):
    if kind == "gemma3":
        made, loader = random_model(config_of(kind)), AutoModelForImageTextToText
    else:
        made, loader = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**MOE)), AutoModelForCausalLM
    made.save_pretrained(tmp_path)
    saved, model = load_file(tmp_path / "model.safetensors"), loader.from_pretrained(tmp_path)
    assert saved.keys() - model.state_dict().keys()
    for parameter in model.parameters():
        parameter.data.zero_()
    with loaded_as_saved(model):
        found = model.load_state_dict(saved, False)
    assert not found.unexpected_keys and "load_state_dict" not in vars(model)
    expected = made.state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in model.state_dict().items())
