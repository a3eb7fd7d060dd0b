"""Architectures and sizes that are refused before anything is loaded, and models without weights."""

import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    BltConfig,
    CLIPTextConfig,
    EncodecConfig,
    Gemma4UnifiedAssistantConfig,
    GitConfig,
    LlamaConfig,
    MusicgenConfig,
    MusicgenDecoderConfig,
    ReformerConfig,
    T5Config,
    XLNetConfig,
)

from benchmarks.miniatures import miniature
from sft_play.config.schema import ModelConfig
from sft_play.errors import ConfigError
from sft_play.model.adapters.targets import text_prefix
from sft_play.model.architecture.shape import class_to_name, empty_model, require_decoder, units_of
from sft_play.model.load import load_model_config

SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
TWO_TEXTS = MusicgenConfig(
    text_encoder=T5Config(), audio_encoder=EncodecConfig(), decoder=MusicgenDecoderConfig()
)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (BartConfig(), "bart is an encoder-decoder"),
        (TWO_TEXTS, "musicgen is an encoder-decoder"),
        (BertConfig(), "bert reads text in both directions"),
        (XLNetConfig(), "xlnet reads text in both directions"),
        (GitConfig(), "git describes images"),
        (BltConfig(), "blt has no single width"),
        (Gemma4UnifiedAssistantConfig(), "gemma4_unified_assistant drafts tokens for another model"),
        (ReformerConfig(is_decoder=True), "reformer computes its gradients by itself"),
        (CLIPTextConfig(), "clip_text_model is not a language model that transformers 5"),
    ],
)
def test_what_is_no_decoder_is_refused_with_what_can_be_trained(config, said):
    with pytest.raises(ConfigError, match=f"{said}.*decoder-only language models"):
        require_decoder(config)


def test_decoders_pass():
    require_decoder(LlamaConfig())
    require_decoder(BertConfig(is_decoder=True))
    with pytest.raises(ConfigError, match="both directions"):
        require_decoder(BertConfig(is_decoder=False))


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "mistral3"])
def test_the_text_part_of_a_multimodal_model_passes_and_can_be_built(kind):
    config = miniature(kind)

    require_decoder(config)

    model = empty_model(config)
    assert text_prefix(model) == "model.language_model"
    assert class_to_name(config) == type(model).__name__


def test_a_class_that_transformers_takes_anyway_is_not_named():
    assert class_to_name(LlamaConfig()) is None


def test_what_a_model_is_comes_before_the_sizes_in_its_config(tmp_path):
    XLNetConfig().save_pretrained(tmp_path)  # its max_position_embeddings is -1

    with pytest.raises(ConfigError, match="xlnet reads text in both directions"):
        load_model_config(ModelConfig(name=str(tmp_path)))


def test_a_model_without_weights_has_the_shapes_and_ties_of_one_with_weights():
    for kind, tied in (("gemma2", True), ("llama", False)):
        config = miniature(kind)
        empty, real = empty_model(config), AutoModelForCausalLM.from_config(config)
        assert all(parameter.is_meta for parameter in empty.parameters())
        shapes, expected = (
            {name: (p.shape, p.dtype) for name, p in each.named_parameters()} for each in (empty, real)
        )
        assert shapes == expected
        assert (empty.get_output_embeddings().weight is empty.get_input_embeddings().weight) == tied


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
    found = load_model_config(write(tmp_path, tree | change)).to_dict()
    assert {name: found[name] for name in change} == change


@pytest.mark.parametrize("tied", [True, False])
def test_the_units_of_a_divided_model_are_its_layers_its_own_embedding_and_the_rest(tied):
    model = empty_model(LlamaConfig(**SIZES, tie_word_embeddings=tied))
    units = units_of(model)
    embedding = [] if tied else [model.model.embed_tokens]  # a shared weight is gathered with the head
    assert units == [*model.model.layers, *embedding, model]


def test_a_model_whose_layers_cannot_be_found_is_not_divided():
    model = empty_model(LlamaConfig(**SIZES))
    model.model.layers, model._no_split_modules = torch.nn.ModuleList(model.model.layers[:1]), []
    with pytest.raises(ConfigError, match="no list of 2 layers in LlamaForCausalLM, so it cannot be divided"):
        units_of(model)
