"""PiSSA and OLoRA change nothing at the start, and what they learn fits the original base."""

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config

from sft_play.config.schema import LoraSettings
from sft_play.errors import CheckpointError, ConfigError
from sft_play.model import decomposition
from sft_play.model.adapters import attach_adapter
from sft_play.model.decomposition import EXACT_UP_TO, START, principal_part, save_start, save_trained

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
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-5)
    own = model.base_model.model.model.layers[0].self_attn.v_proj
    assert (
        own.base_layer.weight - base(tiny_model).model.layers[0].self_attn.v_proj.weight
    ).abs().max() > 1e-3
    train_a_little(model)
    trained = logits(model)
    assert (trained - before).abs().max() > 0.05
    save_trained(model, tmp_path)
    loaded = PeftModel.from_pretrained(base(tiny_model), str(tmp_path))
    torch.testing.assert_close(logits(loaded), trained, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(loaded.merge_and_unload()), trained, rtol=1e-4, atol=1e-4)
    assert loaded.peft_config["default"].r == 16


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_a_resumed_run_gets_the_same_base_bit_for_bit_from_the_file(tiny_model, tmp_path, init):
    lora = LoraSettings(r=8, init=init)
    first = attach_adapter(base(tiny_model, torch.bfloat16), lora)
    save_start(first, tmp_path)
    start = load_file(tmp_path / START)
    save_file({name: value * 1.5 for name, value in start.items()}, tmp_path / "other")
    again, other = (
        attach_adapter(base(tiny_model, torch.bfloat16), lora, start=tmp_path / name)
        for name in (START, "other")
    )
    for (name, one), two in zip(first.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(one, two), name
    assert not torch.equal(logits(first), logits(other))  # the file is what decides


def test_a_start_that_is_missing_or_of_another_model_is_refused(tiny_model, tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / START)
    for path, words in (
        (tmp_path / START, "has no start of base_model"),
        (tmp_path / "none", "cannot be read"),
    ):
        with pytest.raises(CheckpointError, match=words):
            attach_adapter(base(tiny_model), LoraSettings(r=8, init="pissa"), start=path)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_adapter_that_starts_so_takes_no_more_memory_than_another(tiny_model, init):
    for parameter in attach_adapter(base(tiny_model), LoraSettings(r=8, init=init)).parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes


def test_a_rank_above_that_of_a_weight_is_refused_before_weights_are_loaded(tiny_model):
    config = AutoConfig.from_pretrained(tiny_model)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
        with pytest.raises(
            ConfigError, match=r"k_proj, 32 x 64, has no rank 33; set tuning.lora.r.* to 32 or less"
        ):
            attach_adapter(empty, LoraSettings(r=33, init="olora"))


def test_a_large_weight_is_decomposed_quickly_and_almost_exactly_whatever_was_drawn_before():
    size = EXACT_UP_TO + 40
    torch.manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(length, size)).Q for length in (size, 2 * size))
    sizes = torch.arange(1, size + 1) ** -0.25  # falls slowly, which is hard
    weight = (u * sizes) @ v.T
    state = torch.get_rng_state()
    found = principal_part(weight, 16)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    assert all(map(torch.equal, found, principal_part(weight, 16)))
    torch.testing.assert_close(found[1], sizes[:16], rtol=1e-3, atol=0)
    for vectors, expected in ((found[0], u), (found[2], v)):
        assert (expected[:, :16].T @ vectors).square().sum() > 0.999 * 16
    rest = weight - (found[0] * found[1]) @ found[2].T
    assert rest.norm() < 1.0001 * sizes[16:].norm()


def test_olora_starts_with_the_beginning_of_the_whole_decomposition(tiny_model):
    weight = base(tiny_model).model.layers[0].mlp.down_proj.weight.detach()
    q, r = torch.linalg.qr(weight)
    model = attach_adapter(base(tiny_model), LoraSettings(r=8, init="olora"))
    layer = model.base_model.model.model.layers[0].mlp.down_proj
    torch.testing.assert_close(layer.lora_B["default"].weight.detach(), q[:, :8])
    torch.testing.assert_close(layer.lora_A["default"].weight.detach(), r[:8])


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
    torch.testing.assert_close(
        logits(attach_adapter(model, LoraSettings(r=8, init="pissa"))), before, rtol=1e-4, atol=1e-5
    )


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
    torch.testing.assert_close(logits(loaded), logits(model))
    for setting in ("rank_pattern", "alpha_pattern"):
        with pytest.raises(ConfigError, match=f"tuning.lora.{setting}: w_proj matches no module.*q_proj"):
            attach_adapter(base(tiny_model), LoraSettings(**{setting: {"w_proj": 4}}))
