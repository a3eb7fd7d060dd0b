"""Architectures that are refused before anything is loaded."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    BltConfig,
    CLIPTextConfig,
    Gemma4UnifiedAssistantConfig,
    GitConfig,
    LlamaConfig,
    ReformerConfig,
    XLNetConfig,
)

from benchmarks.miniatures import miniature
from sft_play.config.schema import ModelConfig
from sft_play.errors import ConfigError
from sft_play.model.load import load_model_config
from sft_play.model.support import class_to_name, require_decoder
from sft_play.model.targets import text_prefix


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (BartConfig(), "bart is an encoder-decoder"),
        (BertConfig(), "bert reads texts in both directions"),
        (XLNetConfig(), "xlnet reads texts in both directions"),
        (GitConfig(), "git describes images"),
        (BltConfig(), "blt has no single width"),
        (Gemma4UnifiedAssistantConfig(), "gemma4_unified_assistant drafts tokens for another model"),
        (ReformerConfig(is_decoder=True), "reformer computes its gradients by itself"),
        (CLIPTextConfig(), "clip_text_model is no language model, as far as transformers 5"),
    ],
)
def test_what_is_no_decoder_is_refused_with_what_can_be_trained(config, said):
    with pytest.raises(ConfigError, match=f"{said}.*decoder-only language models"):
        require_decoder(config)


def test_decoders_pass():
    require_decoder(LlamaConfig())
    require_decoder(BertConfig(is_decoder=True))


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "mistral3"])
def test_the_text_part_of_a_multimodal_model_passes_and_can_be_built(kind):
    config = miniature(kind)

    require_decoder(config)

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert text_prefix(model) == "model.language_model"
    assert class_to_name(config) == type(model).__name__


def test_a_class_that_transformers_takes_anyway_is_not_named():
    assert class_to_name(LlamaConfig()) is None


def test_what_a_model_is_comes_before_the_sizes_in_its_config(tmp_path):
    XLNetConfig().save_pretrained(tmp_path)  # its max_position_embeddings is -1

    with pytest.raises(ConfigError, match="xlnet reads texts in both directions"):
        load_model_config(ModelConfig(name=str(tmp_path)))
