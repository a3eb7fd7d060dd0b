"""Architectures that are refused before anything is loaded."""

import pytest
from transformers import BartConfig, BertConfig, BltConfig, GitConfig, LlamaConfig, XLNetConfig

from sft_play.config.schema import ModelConfig
from sft_play.errors import ConfigError
from sft_play.model.load import load_model_config
from sft_play.model.support import require_decoder


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (BartConfig(), "bart is an encoder-decoder"),
        (BertConfig(), "bert reads texts in both directions"),
        (XLNetConfig(), "xlnet reads texts in both directions"),
        (GitConfig(), "git describes images"),
        (BltConfig(), "blt has no single width"),
    ],
)
def test_what_is_no_decoder_is_refused_with_what_can_be_trained(config, said):
    with pytest.raises(ConfigError, match=f"{said}.*decoder-only language models"):
        require_decoder(config)


def test_decoders_pass():
    require_decoder(LlamaConfig())
    require_decoder(BertConfig(is_decoder=True))


def test_what_a_model_is_comes_before_the_sizes_in_its_config(tmp_path):
    XLNetConfig().save_pretrained(tmp_path)  # its max_position_embeddings is -1

    with pytest.raises(ConfigError, match="xlnet reads texts in both directions"):
        load_model_config(ModelConfig(name=str(tmp_path)))
