"""Compiled layers compute what the others do, in steps of rows of any lengths, without compiling for each."""

import math
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from benchmarks.context import spec_of
from benchmarks.sizing import build
from benchmarks.small_models import WIDE, small_config
from sft_play.model import compilation, float8
from sft_play.model.compilation import compile_layers
from sft_play.model.loss_head import add_loss_head, score_batch, token_loss
from sft_play.model.recomputation import recompute
from sft_play.parts import RECOMPUTED
from sft_play.sizing.trace import prepare_for_training, trained_parameters
from tests.packages import needs_torchao

SIZES = WIDE | {"hidden": 64, "inner": 96, "heads": 4, "head_dim": 16, "vocabulary": 300, "layers": 2}
STEPS = ((20, 30, 7), (64,), (5, 9, 31, 12), (2, 3), (18,) * 9)
NEAR = 1e-5


def batch_of(lengths: tuple[int, ...]) -> dict:
    draw = torch.Generator().manual_seed(sum(lengths))
    ids = torch.randint(5, 300, (1, sum(lengths)), generator=draw)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": ids, "labels": ids, "position_ids": positions, "sequence_lengths": list(lengths)}


def trained(
    folder, mode: str, way: str, *, compiled: bool, in_float8: bool = False
) -> tuple[list[float], list[float]]:
    """The losses of a few steps, and the sums of the trained weights after them."""
    torch.manual_seed(1)
    spec = spec_of(mode, "keep", joined=True)
    model = build(folder, spec)
    add_loss_head(model)
    prepare_for_training(model, spec)
    if way != "keep":
        recompute(model, RECOMPUTED.with_apart(int(way == "some")))
        if mode != "full":
            model.enable_input_require_grads()
    names = sorted(model.state_dict())
    if in_float8:
        float8.convert_layers(model)
    if compiled:
        compile_layers(model)
    optimizer = torch.optim.AdamW(trained_parameters(model), lr=1e-3)
    losses = []
    for lengths in STEPS:
        loss = token_loss(model, batch_of(lengths))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    score = score_batch(model.eval(), batch_of((11, 40)))
    assert sorted(model.state_dict()) == names
    sums = [parameter.detach().sum().item() for parameter in trained_parameters(model)]
    return [*losses, (score[0] / score[1]).item()], sums


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(small_config("llama", SIZES)).save_pretrained(tmp_path)
    return tmp_path


def tried(folder, mode: str, way: str, **settings) -> int:
    """Compares a run with compiled layers with one without; returns how many graphs were compiled."""
    torch._dynamo.reset()
    counters.clear()
    plain, fast = (trained(folder, mode, way, compiled=compiled, **settings) for compiled in (False, True))
    assert all(map(math.isfinite, plain[0]))
    assert fast[0] == pytest.approx(plain[0], rel=NEAR)
    assert fast[1] == pytest.approx(plain[1], rel=1e-3, abs=1e-3)
    return counters["stats"]["unique_graphs"]


@pytest.fixture
def without_code(monkeypatch):
    """Layers become graphs with gradients as usual, but no code is made of these, which takes the most time."""
    compilation._compiled.cache_clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    yield
    compilation._compiled.cache_clear()


@pytest.mark.thorough
@pytest.mark.usefixtures("without_code")
def test_losses_are_those_of_layers_that_are_not_compiled_and_one_compilation_serves_all_lengths(folder):
    assert tried(folder, "full", "some") == 4  # before attention, after it, and the two parts around both


@needs_torchao
@pytest.mark.usefixtures("without_code")
def test_so_it_does_for_layers_that_multiply_in_float8(folder):
    assert tried(folder, "full", "some", in_float8=True) == 4


@pytest.mark.slow  # it compiles as often as the one before
@pytest.mark.usefixtures("without_code")
def test_another_model_of_the_process_has_the_same_losses(folder):
    first, second = (trained(folder, "full", "some", compiled=True) for _ in range(2))  # of other models
    assert second == first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "way"), [("full", "some"), ("full", "keep"), ("lora", "keep"), ("lora", "recompute")]
)
def test_so_they_are_in_code_with_adapters_and_other_activations(folder, mode, way):
    assert tried(folder, mode, way) <= 7  # the input of the first layer has no gradient
