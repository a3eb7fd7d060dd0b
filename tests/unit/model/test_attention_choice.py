"""Which attention implementation a run uses."""

import pytest
import torch
from transformers import Gemma2Config, LlamaConfig, PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaPreTrainedModel

from sft_play.errors import ConfigError
from sft_play.model import attention, attention_choice
from sft_play.model.attention_choice import choose_attention


def test_attention_is_chosen_by_what_the_model_can():
    assert choose_attention("auto", LlamaConfig(), "cpu") == attention.NAME
    assert choose_attention("auto", Gemma2Config(), "cpu") == "eager"  # soft-capped scores
    assert choose_attention("sdpa", LlamaConfig(), "cpu") == "sdpa"
    assert choose_attention("auto", PretrainedConfig(), "cpu") == "eager"  # a class that is not known yet


@pytest.mark.parametrize(
    ("capability", "flash_3", "flash_2", "expected"),
    [
        ((9, 0), True, True, "flash_attention_3"),
        ((9, 0), False, True, "flash_attention_2"),
        ((8, 0), True, True, "flash_attention_2"),  # version 3 is made for Hopper
        ((10, 0), True, False, attention.NAME),
        ((7, 5), True, True, attention.NAME),
    ],
)
def test_the_newest_package_that_is_made_for_the_gpu_is_taken(
    monkeypatch, capability, flash_3, flash_2, expected
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attention_choice, "is_flash_attn_3_available", lambda kernels_fallback_ok: flash_3)
    monkeypatch.setattr(attention_choice, "is_flash_attn_2_available", lambda: flash_2)
    assert choose_attention("auto", LlamaConfig(), "cuda", capability) == expected


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
