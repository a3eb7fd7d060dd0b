"""MLPs that compute in tiles: the same numbers, of the modules that compute each token by itself."""

from dataclasses import replace

import pytest
import torch

from benchmarks.random_models import random_model
from benchmarks.small_models import NAMES, WIDE, small_config
from benchmarks.steps import step_of, step_with
from sft_play.config.schema import LoraSettings, TuningConfig
from sft_play.model.architecture.shape import decoder_layers, empty_model
from sft_play.model.layers import tiled_mlp
from sft_play.model.layers.loss_head import add_loss_head
from sft_play.model.layers.tiled_mlp import mlps_of, tile_mlps
from sft_play.sizing.step import JoinedRows, PaddedRows, StepSpec
from sft_play.sizing.trace.trace import forward, make_batch, prepare_for_training

SMALL = WIDE | {"layers": 2, "vocabulary": 300}
MIXTURES = ("mixtral", "qwen3_moe")
CLOSE = dict(rtol=1e-5, atol=1e-8)


def gradients(name: str, spec: StepSpec, dropout: float = 0.0, layers: int = 2) -> dict[str, torch.Tensor]:
    """Of all that is trained, and the loss."""
    torch.manual_seed(0)
    lora = {"r": 4, "dropout": dropout}
    tuning = TuningConfig(mode=spec.mode, **({} if spec.mode == "full" else {"lora": lora}))
    config = small_config(name, SMALL | {"layers": layers})
    model = random_model(config, spec, tuning, torch.device("cpu"))
    for path, parameter in model.named_parameters():
        if "lora_B" in path:  # which is zero at first, and so are the gradients of A
            torch.nn.init.normal_(parameter, std=0.02)
    add_loss_head(model)
    prepare_for_training(model, spec)
    batch = make_batch(spec)
    ids = torch.arange(batch["input_ids"].numel()).view(batch["input_ids"].shape) * 7 % 290
    torch.manual_seed(1)
    loss = forward(model, batch | {"input_ids": ids, "labels": ids}, spec)
    loss.backward()
    return {path: p.grad for path, p in model.named_parameters() if p.grad is not None} | {"loss": loss}


@pytest.mark.parametrize("mode", ["full", "lora"])
@pytest.mark.parametrize(
    ("name", "batch"),
    [("llama", PaddedRows(3, 35)), ("gemma3_text", JoinedRows(96)), ("gpt2", JoinedRows(96))],
)
def test_tiles_change_neither_loss_nor_gradients(name, batch, mode):
    spec = step_of(mode=mode, batch=batch, longest=48, lora=LoraSettings(r=4), activations="recompute")
    whole = gradients(name, spec)
    for tile in (32, 50):
        tiled = gradients(name, replace(spec, mlp_tile=tile))
        assert tiled.keys() == whole.keys() and len(whole) > 8
        for path, expected in whole.items():
            near = CLOSE["rtol"] * expected.abs().max()
            assert (tiled[path] - expected).abs().max() <= near, (path, tile)


def test_a_tile_is_computed_again_with_the_dropout_that_it_had(monkeypatch):
    spec = step_of(mode="lora", batch=JoinedRows(96), longest=48, activations="recompute", mlp_tile=32)
    again = gradients("llama", spec, dropout=0.3)
    monkeypatch.setattr(tiled_mlp, "checkpoint", lambda function, tile, **_: function(tile))
    once = gradients("llama", spec, dropout=0.3)
    assert all(torch.equal(once[path], gradient) for path, gradient in again.items())


def test_a_tile_is_computed_three_times_and_the_last_one_twice(monkeypatch):
    """Forward, with its layer, whose recomputation ends with the input of the last one, and by itself."""
    asked = []
    real = tiled_mlp._with_own_casts

    def counted(forward, tile):
        asked.append(tuple(tile.shape))
        return real(forward, tile)

    monkeypatch.setattr(tiled_mlp, "_with_own_casts", counted)
    spec = step_of(mode="full", batch=PaddedRows(2, 50), activations="recompute", mlp_tile=40)
    gradients("llama", spec)
    layers, tile, last = 2, (1, 40, 256), (1, 20, 256)
    assert [shape for shape in asked if shape != tile] == [last] * 2 * layers
    assert asked.count(tile) == 3 * 2 * layers


@pytest.mark.thorough
def test_gradients_of_tiles_are_added_in_the_type_of_the_weight(monkeypatch):
    """Under autocast, where the sum of a shared cast would be rounded to 16 bits after each tile."""
    spec = step_of(
        mode="full", batch=JoinedRows(2048), longest=1024, activations="recompute", mixed_precision="bf16"
    )
    exact = gradients("llama", step_with(spec, mixed_precision="no"), layers=1)

    def error(**changes) -> float:
        found = gradients("llama", step_with(spec, **changes), layers=1)
        wrong = [(found[path] - exact[path]).norm() / exact[path].norm() for path in exact if ".mlp." in path]
        return float(sum(wrong) / len(wrong))

    whole, tiled = error(), error(mlp_tile=64)
    monkeypatch.setattr(tiled_mlp, "_with_own_casts", lambda forward, tile: forward(tile))
    shared = error(mlp_tile=64)
    assert tiled <= 1.02 * whole < shared


def test_mlps_are_found_in_every_dense_layer_and_in_no_mixture_of_experts():
    for name in NAMES:
        layers = decoder_layers(empty_model(small_config(name, SMALL)))[2]
        expected = 0 if name in MIXTURES else 1
        assert [len(list(mlps_of(layer))) for layer in layers] == [expected] * 2, name


@pytest.mark.parametrize("lora", [{}, {"use_dora": True}])
@pytest.mark.parametrize("mode", ["lora", "qlora"])
def test_adapters_do_not_hide_an_mlp(mode, lora):
    tuning = TuningConfig(mode=mode, lora={"r": 4, **lora})
    spec = StepSpec(mode=mode, lora=tuning.lora)
    model = random_model(small_config("phi3", SMALL), spec, tuning, torch.device("cpu"))
    assert tile_mlps(model, 16) == 2
