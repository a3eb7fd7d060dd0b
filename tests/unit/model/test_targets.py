"""What `target_modules: auto` means, per family."""

import re

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.miniatures import INNER, miniature
from sft_play.config.schema import LoraSettings
from sft_play.errors import ConfigError
from sft_play.model.adapters.attach import attach_adapter
from sft_play.model.adapters.targets import auto_targets
from tests.rounding import assert_same_tensor, forward_terms, summed

SAVED = "adapter_model.safetensors"
QKVO = {f"self_attn.{name}_proj" for name in "qkvo"}
MLP = {"gate_proj", "up_proj", "down_proj"}
FUSED = {"experts.gate_up_proj", "experts.down_proj"}


def short(names) -> set[str]:
    """Names without the layer: "self_attn.q_proj"."""
    return {re.sub(r".*layers\.\d+\.(mlp\.|block_sparse_moe\.|feed_forward\.)?", "", name) for name in names}


@pytest.mark.parametrize(
    ("family", "modules", "experts"),
    [
        ("mixtral", QKVO, FUSED),
        ("qwen3_moe", QKVO, FUSED),
        ("gpt_oss", QKVO, FUSED),
        ("granitemoe", QKVO, FUSED),
        ("phimoe", QKVO, FUSED),  # its router is a linear layer that returns a tuple
        ("olmoe", QKVO, FUSED),
        ("llama4_text", QKVO | MLP | {f"shared_expert.{name}" for name in MLP}, FUSED),
        ("llama", QKVO | MLP, set()),
        ("mamba2", {"mixer.in_proj"}, set()),  # kernels read the weights of out_proj
    ],
)
def test_auto_means_attention_and_experts_but_no_router(family, modules, experts):
    with torch.device("meta"):
        targets = auto_targets(AutoModelForCausalLM.from_config(miniature(family)))
    assert short(targets.modules) == modules
    assert short(targets.experts) == experts


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_adapters_on_experts_have_the_layout_that_vllm_reads(family, tmp_path):
    """Both weights of a layer under the name of the experts, each expert's rows one after the other.

    Source: vllm-project/vllm, NovaSky-AI/SkyRL#1852: "experts.base_layer" is the first product, lora_A of
    [experts x r, in], lora_B of [out, experts x r].
    """
    rank, config = 2, miniature(family)
    adapted = attach_adapter(AutoModelForCausalLM.from_config(config), LoraSettings(r=rank))

    adapted.save_pretrained(tmp_path)

    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / SAVED).items()}
    experts = next(name for name in shapes if ".layers.0.mlp.experts.lora_A" in name).rpartition("lora_A")[0]
    found = {name.removeprefix(experts): shape for name, shape in shapes.items() if experts in name}
    width, rows = config.hidden_size, 4 * rank
    assert found == {
        "base_layer.lora_A.weight": (rows, width),
        "base_layer.lora_B.weight": (2 * INNER, rows),
        "lora_A.weight": (rows, INNER),
        "lora_B.weight": (width, rows),
    }


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(7, 39)[None]).logits


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gpt_oss", "llama4_text"])
def test_an_adapter_on_experts_is_the_same_after_it_was_saved_and_after_it_was_merged(family, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(miniature(family))
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapted = attach_adapter(model, LoraSettings(r=4))
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert any(".experts." in name for name in trained)
    assert not [name for name in trained if "router" in name or ".gate." in name]
    before = logits(adapted)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    expected = logits(adapted)
    assert (expected - before).abs().max() > 0.1
    adapted.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_config(miniature(family))
    again.load_state_dict(base)
    loaded = PeftModel.from_pretrained(again, tmp_path)  # as any program would
    near = summed(forward_terms(loaded, tokens=32))
    assert_same_tensor(logits(loaded), expected, near)
    assert_same_tensor(logits(loaded.merge_and_unload()), expected, near)


@pytest.mark.parametrize("setting", [{"dropout": 0.1}, {"use_dora": True}])
def test_what_does_not_work_on_fused_experts_is_refused(setting):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(miniature("mixtral"))
    name = next(iter(setting))
    with pytest.raises(ConfigError, match=f"tuning.lora.{name}=.* fused experts of MixtralForCausalLM"):
        attach_adapter(model, LoraSettings(**setting))
