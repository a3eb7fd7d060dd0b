"""config.json of a model with sizes that make no sense."""

import json

import pytest

from sft_play.config.schema import ModelConfig
from sft_play.errors import ConfigError
from sft_play.model.load import load_model_config


def write(folder, tree) -> ModelConfig:
    (folder / "config.json").write_text(tree if isinstance(tree, str) else json.dumps(tree))
    return ModelConfig(name=str(folder))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": -1}, "hidden size (-1) is not a multiple"),
        ({"hidden_size": -64}, "hidden_size is -64; expected a whole number from 1 to 268,435,456"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": "large"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"vocab_size": 0}, "vocab_size is 0; expected a whole number from 1 to 268,435,456"),
        (
            {"num_hidden_layers": 10**7},
            "num_hidden_layers is 1e+07; expected at most 2,000",
        ),
        ({"model_type": "gpt2", "n_layer": 10**7}, "n_layer is 1e+07"),
        ({"model_type": "qwen2", "num_hidden_layers": 10**30}, "num_hidden_layers is 1e+30"),
        ({"text_config": {"num_hidden_layers": 10**7}}, "num_hidden_layers is 1e+07"),
        ({"num_attention_heads": 3, "head_dim": None}, "heads"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not divisible by num_key_value_heads 3"),
        ({"intermediate_size": 10**12}, "intermediate_size"),
        ({"rope_parameters": "x"}, ""),
        ({"model_type": "nope"}, "nope"),
        ({"model_type": None}, ""),
    ],
    ids=str,
)
def test_sizes_that_make_no_sense_are_one_sentence(tiny_model, tmp_path, change, said):
    tree = json.loads((tiny_model / "config.json").read_text())
    with pytest.raises(ConfigError) as error:
        load_model_config(write(tmp_path, tree | change))
    text = str(error.value)
    assert text.startswith("model.name: ") and str(tmp_path) in text and said in text
    assert len(text.splitlines()) == 2 and len(text) < 700


@pytest.mark.parametrize("text", ["", "[]", "{", '"x"', "null", '{"a": ' * 5000])
def test_a_config_that_is_no_object_is_one_sentence(tmp_path, text):
    with pytest.raises(ConfigError, match="model.name: "):
        load_model_config(write(tmp_path, text))


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4},
        {"model_type": "gemma2", "head_dim": 48},
        {"model_type": "mamba"},
    ],
    ids=str,
)
def test_architectures_with_other_sizes_are_accepted(tiny_model, tmp_path, change):
    tree = json.loads((tiny_model / "config.json").read_text())
    load_model_config(write(tmp_path, tree | change))
