"""Compiled layers compute what the others do, in steps of rows of any lengths, without compiling for each."""

import gc
import os
import random
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.nn.attention import varlen
from transformers import AutoModelForCausalLM

from benchmarks.context import spec_of
from benchmarks.sizing import build
from benchmarks.small_models import WIDE, small_config
from sft_play.model.architecture.shape import decoder_layers
from sft_play.model.attention import operator
from sft_play.model.layers import compilation, float8
from sft_play.model.layers.compilation import compile_layers
from sft_play.model.layers.loss_head import add_loss_head, score_batch, token_loss
from sft_play.model.layers.recomputation import recompute
from sft_play.parts import RECOMPUTED
from sft_play.sizing.trace.trace import prepare_for_training, trained_parameters
from sft_play.upstream.torch import compiling_layers
from tests.packages import needs_torchao

SIZES = WIDE | {"hidden": 64, "inner": 96, "heads": 4, "groups": 2, "head_dim": 16, "vocabulary": 300, "layers": 2}  # fmt: skip
DRAW = random.Random(0)
# the first micro-batch has as many tokens as the model is wide: these are two sizes, not one
STEPS = [(20, 30, 14), *(tuple(DRAW.choices(range(1, 15), k=DRAW.randint(1, 6))) for _ in range(49))]
NEAR = 1e-6  # of the loss, and of the norm of all gradients


def batch_of(lengths: tuple[int, ...]) -> dict:
    draw = torch.Generator().manual_seed(sum(lengths))
    ids = torch.randint(5, 300, (1, sum(lengths)), generator=draw)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": ids, "labels": ids, "position_ids": positions, "sequence_lengths": list(lengths)}


def trained(folder, mode: str, way: str, *, compiled: bool, in_float8: bool = False) -> list[torch.Tensor]:
    """Of each micro-batch the loss, and of all gradients one vector; at the end the loss of an evaluation."""
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
    weights = trained_parameters(model)
    for weight in weights:
        if not weight.any():  # PEFT begins with zeros, with which the others have none but zero gradients
            torch.nn.init.normal_(weight, std=0.02)
    if in_float8:
        float8.convert_layers(model)
        weights = trained_parameters(model)
    if compiled:
        compile_layers(model)
    found = []
    for lengths in STEPS:
        loss = token_loss(model, batch_of(lengths))
        gradients = torch.autograd.grad(loss, weights)
        found += [loss.detach(), torch.cat([each.flatten() for each in gradients])]
    score = score_batch(model.eval(), batch_of((11, 40)))
    assert sorted(model.state_dict()) == names
    return [*found, score[0] / score[1]]


def saved(path, name: str = "llama", **settings):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(small_config(name, SIZES, **settings)).save_pretrained(path)
    return path


@pytest.fixture
def folder(tmp_path):
    return saved(tmp_path)


def tried(folder, mode: str, way: str, near: float = NEAR, **settings) -> int:
    """Compares a run with compiled layers with one without; returns how many graphs were compiled."""
    torch._dynamo.reset()
    counters.clear()
    plain, fast = (trained(folder, mode, way, compiled=compiled, **settings) for compiled in (False, True))
    assert all(one.isfinite().all() for one in plain)
    for one, other in zip(fast, plain, strict=True):
        assert (one - other).norm() <= near * other.norm()
    return counters["stats"]["unique_graphs"]


@pytest.fixture
def without_code(monkeypatch):
    """Layers become graphs with gradients as usual, but no code is made of these, which takes the most time."""
    compilation._compiled.cache_clear()
    monkeypatch.setattr(compilation, "in_given_order", partial(torch.compile, backend="aot_eager"))
    yield
    compilation._compiled.cache_clear()


@pytest.mark.usefixtures("without_code")
def test_one_graph_serves_fifty_micro_batches_and_gives_their_losses_and_gradients(tmp_path):
    folder = saved(tmp_path, attention_bias=True)  # torch 2.11 gave no gradient to a sum in place
    assert tried(folder, "lora", "recompute") == 1  # attention is in it
    assert not counters["graph_break"]


@pytest.mark.thorough
@pytest.mark.usefixtures("without_code")
@pytest.mark.parametrize(
    ("name", "mode", "way", "settings", "graphs"),
    [
        ("mistral", "lora", "keep", {"sliding_window": 9}, 2),  # the input of the first layer has no gradient
        pytest.param("qwen3", "full", "some", {}, 1, marks=pytest.mark.slow),
        ("gemma3_text", "lora", "recompute", {"sliding_window": 9}, 1),  # its two kinds get other arguments
        pytest.param("qwen3", "qlora", "keep", {}, 2, marks=pytest.mark.slow),  # weights of 4 bits
    ],
)
def test_so_it_does_for_other_models_and_activations(tmp_path, name, mode, way, settings, graphs):
    assert tried(saved(tmp_path, name, **settings), mode, way) == graphs


@pytest.mark.slow
@pytest.mark.usefixtures("without_code")
def test_attention_that_no_operator_has_stands_between_graphs(tmp_path):
    assert 4 <= tried(saved(tmp_path, "llama", attention_dropout=0.2), "full", "keep") <= 8


@pytest.mark.thorough
@pytest.mark.usefixtures("without_code")
def test_so_does_the_operator_of_gpus(tmp_path, monkeypatch):
    """Its kernels are those of the CPU here; its shapes, its gradient and its graph are PyTorch's."""

    def forward(query, key, value, offsets, _, longest, __, causal, scale, window, *others):
        lengths = offsets.diff().tolist()
        assert longest == max(2, *lengths) and causal == (window[0] < 0)
        tensors = query, key, value, offsets
        out, sums = operator._on_cpu(*tensors, None if causal else window[0] + 1, scale)
        return out, sums, torch.zeros(2, dtype=torch.uint64)

    def backward(grad, query, key, value, out, sums, offsets, _, __, ___, causal, ____, scale, window):
        tensors = grad, query, key, value, out, sums, offsets
        return operator._gradients_on_cpu(*tensors, None if causal else window[0] + 1, scale)

    varlen._varlen_attn.register_kernel("cpu", forward)
    varlen._varlen_attn_backward.register_kernel("cpu", backward)
    monkeypatch.setattr(operator, "on_cpu", lambda tensor: False)
    monkeypatch.setattr(operator, "takes_one_call", lambda *about: True)
    assert tried(saved(tmp_path, "mistral", sliding_window=9), "full", "some") == 1


@needs_torchao
@pytest.mark.usefixtures("without_code")
def test_so_it_does_for_layers_that_multiply_in_float8(folder):
    assert tried(folder, "full", "some", near=1e-3, in_float8=True) == 1


@pytest.mark.slow  # it compiles as often as the one before
@pytest.mark.usefixtures("without_code")
def test_another_model_of_the_process_has_the_same_losses(folder):
    first, second = (trained(folder, "full", "some", compiled=True) for _ in range(2))  # of other models
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "way", "graphs"),
    [
        ("full", "some", 1),
        ("full", "keep", 1),
        ("lora", "keep", 2),
        ("lora", "recompute", 1),
        ("qlora", "recompute", 1),
    ],
)
def test_so_they_are_in_code_with_adapters_and_other_activations(folder, mode, way, graphs):
    assert tried(folder, mode, way) == graphs


def test_code_is_kept_in_the_cache_or_said_to_be_in_a_folder_of_the_process(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path))
    compilation._kept_code.cache_clear()
    assert compilation._kept_code().startswith(f"{tmp_path}/compiled/") and not capsys.readouterr().out
    tmp_path.chmod(0o777)
    compilation._kept_code.cache_clear()
    folder = Path(compilation._kept_code())
    assert not folder.is_relative_to(tmp_path) and folder.stat().st_mode & 0o777 == 0o700
    assert "compiled code is not kept, because other users can write to" in capsys.readouterr().out
    compilation._kept_code.cache_clear()


def test_a_folder_that_the_user_names_for_the_compiler_stands(monkeypatch):
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")

    def within() -> list[str | None]:
        with compiling_layers(1, "code", lambda: "/kept"):
            return [os.environ.get(name) for name in names]

    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert within() == ["/kept", "/kept/triton"] and not set(names) & set(os.environ)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())  # as PyTorch sets it by itself
    monkeypatch.setenv("TRITON_CACHE_DIR", "/own")
    assert within() == ["/kept", "/own"]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/own")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    assert within() == ["/own", None]  # in the other one, by PyTorch


@pytest.mark.usefixtures("without_code")
def test_no_input_stays_in_memory_because_a_layer_was_compiled_with_it(tmp_path):
    spec = spec_of("full", "keep", joined=True)
    model = build(saved(tmp_path, "smollm3", num_hidden_layers=4), spec)  # the last one without positions
    add_loss_head(model)
    compile_layers(model)
    turned: list[weakref.ref] = []
    for layer in decoder_layers(model)[2]:
        layer.register_forward_pre_hook(
            lambda _, args, named: turned.extend(map(weakref.ref, named["position_embeddings"])),
            with_kwargs=True,
        )
    gc.collect()
    gc.disable()
    try:
        token_loss(model, batch_of((11, 40))).backward()
        assert [each() for each in turned] == [None] * 8
    finally:
        gc.enable()
