"""PiSSA and OLoRA change nothing at the start, and what they learn fits the original base."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, set_seed

from sft_play.config.schema import LoraSettings
from sft_play.errors import ConfigError
from sft_play.model.adapters import decomposition
from sft_play.model.adapters.attach import attach_adapter
from sft_play.model.adapters.decomposition import save_trained
from sft_play.model.architecture.shape import empty_model
from tests.rounding import assert_same_tensor, forward_terms, summed

IDS = torch.arange(7, 39)[None]


def base(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def train_a_little(model) -> None:
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.02 * torch.randn_like(parameter)


@pytest.mark.parametrize(
    "lora",
    [
        LoraSettings(r=8, init="pissa"),
        LoraSettings(r=8, init="olora", alpha=4),
        LoraSettings(
            r=8, init="pissa", use_rslora=True, rank_pattern={"q_proj": 4}, alpha_pattern={"k_proj": 3}
        ),
    ],
    ids=["pissa", "olora", "rslora and patterns"],
)
def test_the_saved_adapter_is_the_trained_model_on_the_original_base(tiny_model, tmp_path, lora):
    before = logits(base(tiny_model))
    model = attach_adapter(base(tiny_model), lora)
    near = summed(forward_terms(model, tokens=IDS.numel()))
    assert_same_tensor(logits(model), before, near)
    own = model.base_model.model.model.layers[0].self_attn.v_proj
    assert (
        own.base_layer.weight - base(tiny_model).model.layers[0].self_attn.v_proj.weight
    ).abs().max() > 1e-3
    train_a_little(model)
    trained = logits(model)
    assert (trained - before).abs().max() > 0.05
    save_trained(model, tmp_path)
    loaded = PeftModel.from_pretrained(base(tiny_model), str(tmp_path))
    assert_same_tensor(logits(loaded), trained, near)
    assert_same_tensor(logits(loaded.merge_and_unload()), trained, near)
    assert loaded.peft_config["default"].r == 16


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_a_resumed_run_gets_the_same_base_bit_for_bit_from_its_seed(tiny_model, init):
    models = []
    for drawn_before in (0, 5):
        torch.rand(drawn_before)
        set_seed(42)  # as the trainer does
        models.append(attach_adapter(base(tiny_model, torch.bfloat16), LoraSettings(r=8, init=init)))
    for (name, one), two in zip(models[0].state_dict().items(), models[1].state_dict().values(), strict=True):
        assert torch.equal(one, two), name


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_adapter_that_starts_so_takes_no_more_memory_than_another(tiny_model, init):
    for parameter in attach_adapter(base(tiny_model), LoraSettings(r=8, init=init)).parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes


def test_a_rank_above_that_of_a_weight_is_refused_before_weights_are_loaded(tiny_model):
    config = AutoConfig.from_pretrained(tiny_model)
    empty = empty_model(config)
    with torch.device("meta"):
        with pytest.raises(
            ConfigError, match=r"k_proj, 32 x 64, has no rank 33; set tuning.lora.r.* to 32 or less"
        ):
            attach_adapter(empty, LoraSettings(r=33, init="olora"))


def test_preparing_adapters_for_a_while_is_said(tiny_model, monkeypatch, capsys):
    attach_adapter(base(tiny_model), LoraSettings(r=4, init="pissa"))
    assert "prepared" not in capsys.readouterr().out
    monkeypatch.setattr(decomposition, "SAID_FROM", 0)
    attach_adapter(base(tiny_model), LoraSettings(r=4, init="pissa"))
    assert "  pissa: prepared 14 adapters in " in capsys.readouterr().out


def test_a_weight_that_is_not_finite_is_named(tiny_model):
    model = base(tiny_model)
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(ConfigError, match="layers.1.mlp.up_proj cannot be decomposed"):
        attach_adapter(model, LoraSettings(r=4, init="pissa"))


def test_weights_that_are_stored_transposed_are_decomposed_as_well():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=64)
    )
    before = logits(model)
    adapted = attach_adapter(model, LoraSettings(r=8, init="pissa"))
    assert_same_tensor(logits(adapted), before, summed(forward_terms(adapted, tokens=IDS.numel())))


def test_olora_of_weights_that_are_stored_transposed_is_refused():
    config = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=64)
    with pytest.raises(ConfigError, match="stored transposed, as that of .*set tuning.lora.init=pissa"):
        attach_adapter(AutoModelForCausalLM.from_config(config), LoraSettings(r=8, init="olora"))


def test_a_pattern_gives_modules_their_rank_and_one_that_matches_nothing_is_refused(tiny_model, tmp_path):
    lora = LoraSettings(
        r=8, rank_pattern={"layers.1.self_attn.q_proj": 2, "q_proj": 4}, alpha_pattern={"k_proj": 3}
    )
    model = attach_adapter(base(tiny_model), lora)
    layers = model.base_model.model.model.layers
    ranks = [layer.self_attn.q_proj.r["default"] for layer in layers]
    assert ranks == [4, 2] and layers[0].self_attn.v_proj.r["default"] == 8
    assert layers[0].self_attn.k_proj.scaling["default"] == 3 / 8
    train_a_little(model)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(base(tiny_model), str(tmp_path))
    assert_same_tensor(logits(loaded), logits(model), summed(forward_terms(model, tokens=IDS.numel())))
    for setting in ("rank_pattern", "alpha_pattern"):
        with pytest.raises(ConfigError, match=f"tuning.lora.{setting}: w_proj matches no module.*q_proj"):
            attach_adapter(base(tiny_model), LoraSettings(**{setting: {"w_proj": 4}}))
