"""Which attention implementation a run uses."""

from typing import get_args

import pytest
import torch
from transformers import (
    DeepseekV32Config,
    DogeConfig,
    FalconConfig,
    Gemma2Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    NemotronConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3NextConfig,
)
from transformers.models.llama.modeling_llama import LlamaPreTrainedModel
from transformers.utils import import_utils

from sft_play.config.schema import ModelConfig, RunConfig
from sft_play.errors import ConfigError
from sft_play.model.attention import varlen
from sft_play.model.attention.choice import choose_attention, why_rows_mix
from sft_play.model.attention.table import ATTENTIONS
from sft_play.planning.candidates.sequence import why_padded
from sft_play.reasons.method import Padded


def test_the_table_has_a_row_for_each_value_of_the_setting():
    allowed = ModelConfig.model_fields["attention"].annotation
    assert {*ATTENTIONS, "auto"} == set(get_args(allowed))


def test_attention_is_chosen_by_what_the_model_can():
    assert choose_attention("auto", LlamaConfig(), "cpu") == varlen.NAME
    assert choose_attention("auto", Gemma2Config(), "cpu") == "eager"  # soft-capped scores
    assert choose_attention("auto", GptOssConfig(), "cpu") == varlen.NAME  # sinks
    for config in (FalconConfig(), DeepseekV32Config(), Llama4TextConfig(), DogeConfig()):
        assert choose_attention("auto", config, "cpu") == "sdpa"  # masks or classes of their own
    assert choose_attention("sdpa", LlamaConfig(), "cpu") == "sdpa"
    assert choose_attention("auto", PretrainedConfig(), "cpu") == "eager"  # a class that is not known yet


@pytest.fixture
def packages(monkeypatch):
    """Every package is installed, beside a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(import_utils, "is_flash_attn_3_available", lambda kernels_fallback_ok: True)
    monkeypatch.setattr(import_utils, "is_flash_attn_2_available", lambda: True)


@pytest.mark.usefixtures("packages")
def test_a_package_is_taken_only_for_attention_that_ours_does_not_compute(monkeypatch):
    for capability in ((8, 0), (9, 0), (12, 0)):
        assert choose_attention("auto", LlamaConfig(), "cuda", capability) == varlen.NAME
    capped = Gemma2Config(attention_dropout=0.0)
    assert choose_attention("auto", capped, "cuda", (9, 0)) == "flash_attention_3"  # made for Hopper
    assert choose_attention("auto", capped, "cuda", (8, 0)) == "flash_attention_2"
    assert (
        choose_attention("auto", Gemma2Config(attention_dropout=0.1), "cuda", (9, 0)) == "flash_attention_2"
    )
    assert choose_attention("auto", capped, "cuda", (7, 5)) == "eager"
    assert choose_attention("auto", capped, "cuda", (9, 0), "float32") == "eager"
    monkeypatch.setattr(import_utils, "is_flash_attn_3_available", lambda kernels_fallback_ok: False)
    assert choose_attention("auto", capped, "cuda", (9, 0)) == "flash_attention_2"


@pytest.mark.parametrize(
    ("config", "dtype", "message"),
    [
        (
            LlamaConfig(),
            "float32",
            "16 bits, and this run in float32; set train.mixed_precision=bf16 or fp16",
        ),
        (LlamaConfig(attention_dropout=0.1), "bfloat16", "no dropout, but llama has attention dropout 0.1"),
        (LlamaConfig(head_dim=320), "float16", "at most 256 values, and llama has 320"),
        (GptOssConfig(), "bfloat16", "gpt_oss have attention sinks, which it would ignore"),
    ],
)
def test_what_a_package_cannot_compute_is_named(config, dtype, message):
    with pytest.raises(
        ConfigError, match=f"attention=flash_attention_3: .*{message}.*, or set model.att.*auto"
    ):
        choose_attention("flash_attention_3", config, "cuda", (9, 0), dtype)
    assert (
        choose_attention("flash_attention_3", LlamaConfig(), "cuda", (9, 0), "bfloat16")
        == "flash_attention_3"
    )


@pytest.mark.usefixtures("packages")
def test_a_model_that_flash_attention_does_not_know_gets_another():
    assert choose_attention("auto", DogeConfig(), "cuda", (8, 0)) == "sdpa"
    with pytest.raises(
        ConfigError, match="model.attention=flash_attention_2: DogeForCausalLM does not support"
    ):
        choose_attention("flash_attention_2", DogeConfig(), "cuda", (8, 0))


@pytest.mark.parametrize(
    ("asked", "device", "capability", "message"),
    [
        (
            "flash_attention_2",
            "cuda",
            (7, 5),
            "compute capability 7.5 cannot run it.* allowed here: auto, .*eager$",
        ),
        ("flash_attention_3", "cuda", (12, 0), "allowed here: auto, .*eager, flash_attention_2$"),
        ("flash_attention_2", "cpu", None, "the CPU cannot run it"),
    ],
)
def test_attention_that_the_device_cannot_run_is_refused_with_what_it_can(asked, device, capability, message):
    with pytest.raises(ConfigError, match=f"model.attention={asked}: .*{message}"):
        choose_attention(asked, LlamaConfig(), device, capability)
    assert choose_attention(asked, LlamaConfig(), "cuda", (9, 0)) == asked
    assert choose_attention(asked, LlamaConfig(), "cuda") == asked  # of an unknown GPU


def test_a_library_that_no_longer_says_what_its_models_can_is_named(monkeypatch):
    monkeypatch.delattr(PreTrainedModel, "_supports_sdpa")
    monkeypatch.delattr(LlamaPreTrainedModel, "_supports_sdpa")
    with pytest.raises(ConfigError, match="LlamaForCausalLM does not say .*make install"):
        choose_attention("auto", LlamaConfig(), "cpu")


@pytest.mark.parametrize(("asked", "config"), [(varlen.NAME, FalconConfig()), ("sdpa", GptOssConfig())])
def test_attention_that_the_architecture_lacks_is_refused(asked, config):
    with pytest.raises(
        ConfigError, match=f"model.attention={asked}: .* does not support it; allowed .* auto"
    ):
        choose_attention(asked, config, "cpu")


def run_config(**train) -> RunConfig:
    return RunConfig.model_validate({"model": {"name": "m"}, "data": {"train_path": "d"}, "train": train})


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Qwen3NextConfig(), Padded("boundaries", "Qwen3NextForCausalLM")),
        (FalconConfig(), Padded("boundaries", "FalconForCausalLM")),
        (NemotronConfig(), Padded("boundaries", "NemotronForCausalLM")),  # its layers keep them back
        (DeepseekV32Config(), Padded("layers", DeepseekV32Config().layer_types[0])),
    ],
)
def test_rows_that_would_mix_are_padded_and_not_packed(config, reason):
    name = choose_attention("auto", config, "cpu")
    assert why_padded(False, "auto", why_rows_mix(config), name) == reason
    for asked in ((True, "auto"), (False, True)):
        with pytest.raises(ConfigError, match=f"train.*=true joins rows .*, but {reason.why()}; set train"):
            why_padded(*asked, why_rows_mix(config), name)


def test_rows_of_gpt_oss_can_be_packed():
    assert why_padded(True, "auto", why_rows_mix(GptOssConfig()), varlen.NAME) is None
    assert why_padded(False, "auto", why_rows_mix(GptOssConfig()), varlen.NAME) is None


def test_rows_are_padded_where_the_config_or_the_attention_says_so():
    assert why_padded(False, False, why_rows_mix(LlamaConfig()), varlen.NAME) == Padded("config")
    assert why_padded(False, "auto", why_rows_mix(LlamaConfig()), "eager") == Padded("attention", "eager")
