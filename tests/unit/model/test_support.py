"""Architectures that are refused before anything is loaded."""

import pytest
from transformers import BartConfig, BertConfig, BltConfig, GitConfig, LlamaConfig, XLNetConfig

from sft_play.errors import ConfigError
from sft_play.model.support import require_decoder


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (BartConfig(), "bart is an encoder-decoder"),
        (BertConfig(), "bert reads texts in both directions"),
        (XLNetConfig(), "xlnet reads texts in both directions"),
        (GitConfig(), "git describes images"),
        (BltConfig(), "no hidden_size"),
    ],
)
def test_what_is_no_decoder_is_refused_with_what_can_be_trained(config, said):
    with pytest.raises(ConfigError, match=f"{said}.*decoder-only language models"):
        require_decoder(config)


def test_decoders_pass():
    require_decoder(LlamaConfig())
    require_decoder(BertConfig(is_decoder=True))
