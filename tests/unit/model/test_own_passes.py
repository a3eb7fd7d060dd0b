"""Norms and rotary embeddings compute what those of transformers do."""

import contextlib
import copy
import inspect
from importlib import import_module

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from benchmarks.miniatures import miniature
from benchmarks.random_models import random_base, stock_forwards
from benchmarks.small_models import TALL, small_config
from sft_play.model.layers import own_passes
from sft_play.sizing.recording.recorder import AllocationRecorder
from tests.rounding import (
    assert_same_norm,
    assert_same_tensor,
    assert_same_values,
    step_terms,
    summed,
)

SHAPE = TALL | {"layers": 2, "vocabulary": 100}
CPU = torch.device("cpu")
TOKENS, SIZE = 6, 64
ROUNDINGS = SIZE * torch.finfo(torch.float32).eps  # of sums over SIZE values, the longest there are


def base(config, *, stock: bool, dtype: str = "float32"):
    """A model with random weights, norms included."""
    torch.manual_seed(0)
    with stock_forwards() if stock else contextlib.nullcontext():
        model = random_base(config, dtype=dtype, attn_implementation="sdpa", device=CPU, quantize=False)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1, 0.3)
    return model.train()


def replaced(model):
    """Names of the functions that were put in the place of a forward pass."""
    return [m.forward.__func__.__name__ for m in model.modules() if "forward" in vars(m)]


def one_step(model, *, autocast: bool = False, checkpointing: bool = False):
    """Loss and gradients of all weights."""
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.arange(18).view(2, 9) * 5
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), torch.cat([p.grad.float().flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("llama", {}),
        ("llama", {"checkpointing": True}),
        ("llama", {"autocast": True}),
        ("qwen3", {}),  # norms of queries and keys
        ("mixtral", {}),
    ],
)
def test_a_step_is_that_of_transformers(family, how):
    config = small_config(family, SHAPE)
    (loss, theirs), (our_loss, ours) = (one_step(base(config, stock=stock), **how) for stock in (True, False))
    terms = step_terms(base(config, stock=True), tokens=2 * 9)
    near = 0.03 if how.get("autocast") else summed(terms)  # bf16 has three digits
    assert_same_values([float(our_loss)], [float(loss)], near)
    assert_same_norm(ours, theirs, near)


def results(compute, *inputs):
    """What a function returns, and the gradients of its inputs and of the parameters that it has."""
    inputs = [each.clone().requires_grad_() for each in inputs]
    out = compute(*inputs)
    out = torch.cat([each.flatten() for each in out]) if isinstance(out, tuple) else out.flatten()
    (out * torch.linspace(-1, 1, len(out))).sum().backward()
    parameters = compute.parameters() if isinstance(compute, torch.nn.Module) else ()
    return [out.detach(), *(each.grad for each in (*inputs, *parameters))]


def norms(kind):
    """Results of a norm, and of the same one with our forward pass."""
    theirs = kind(SIZE)
    torch.nn.init.normal_(theirs.weight, 1, 0.3)
    ours = copy.deepcopy(theirs)
    own_passes.replace_forwards(ours)
    assert replaced(ours) == ["norm_forward"]
    x = torch.randn(TOKENS, SIZE)
    return results(theirs, x), results(ours, x)


def rotations(kind):
    """Results of what an attention rotates queries and keys with, and of what it calls in our forward pass."""
    ours = own_passes._replacement(kind, own_passes)
    assert "apply_rotary_pos_emb" in ours.__code__.co_names
    heads = torch.randn(1, 4, TOKENS, SIZE), torch.randn(1, 2, TOKENS, SIZE)
    angles = torch.randn(2, 1, TOKENS, SIZE)

    def rotate(names):
        return results(lambda q, k: names["apply_rotary_pos_emb"](q, k, *angles), *heads)

    return rotate(inspect.unwrap(kind.forward).__globals__), rotate(ours.__globals__)


FAMILIES = """
    apertus bamba deepseek_v3 exaone4 gemma gemma2 gemma3 glm4_moe granite granitemoehybrid hunyuan_v1_dense
    lfm2 llama minimax mistral mixtral mllama olmoe phi qwen2 qwen2_5_vl qwen3 qwen3_moe seed_oss smollm3
    stablelm starcoder2 zamba2
"""


@pytest.mark.parametrize("family", FAMILIES.split())
def test_what_has_the_code_of_llama_computes_what_it_does(family):
    torch.manual_seed(0)
    library = import_module(f"transformers.models.{family}.modeling_{family}")
    kinds = [
        kind
        for kind in vars(library).values()
        if isinstance(kind, type) and kind.__module__ == library.__name__
    ]
    ours = {
        kind: own_passes._replacement(kind, own_passes) for kind in kinds if issubclass(kind, torch.nn.Module)
    }
    found = {
        kind: norms(kind) if forward is own_passes.norm_forward else rotations(kind)
        for kind, forward in ours.items()
        if forward
    }
    assert found
    for kind, both in found.items():
        errors = [(our - their).abs().max() / their.abs().max() for their, our in zip(*both, strict=True)]
        assert max(errors) <= ROUNDINGS, kind


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norm_in_16_bit_is_computed_in_fp32(dtype):
    torch.manual_seed(0)
    stock = LlamaRMSNorm(64).to(dtype)
    ours = copy.deepcopy(stock)
    own_passes.replace_forwards(ours)
    found = []
    for norm in (stock, ours):
        x = (300 * torch.ones(3, 64)).normal_(300).to(dtype).requires_grad_()  # its squares overflow fp16
        out = norm(x)
        assert out.dtype == dtype
        (out * torch.arange(64)).sum().backward()
        found.append((out, x.grad, norm.weight.grad))
    for theirs, our in zip(*found, strict=True):
        torch.testing.assert_close(our, theirs, rtol=0.02, atol=0.02)


def test_layers_of_other_code_stay_as_they_are():
    llama = base(small_config("llama", SHAPE), stock=False)
    assert sorted(replaced(llama)) == ["forward"] * 2 + ["norm_forward"] * 5
    assert replaced(base(small_config("gpt2", SHAPE), stock=False)) == []
    # the same function for queries and keys, which rotates pairs in the other direction
    assert replaced(base(miniature("nanochat"), stock=False)) == []


def test_a_norm_that_is_copied_to_be_trained_uses_the_weight_of_the_copy():
    norm = LlamaRMSNorm(8)
    own_passes.replace_forwards(norm)
    copied = copy.deepcopy(norm)
    torch.nn.init.constant_(copied.weight, 3)
    x = torch.randn(2, 8)
    assert torch.equal(copied(x), 3 * norm(x))


def test_a_norm_keeps_its_input_and_one_number_per_token():
    norm = LlamaRMSNorm(1000).to(torch.bfloat16).requires_grad_(False)
    own_passes.replace_forwards(norm)
    x = torch.randn(100, 1000, dtype=torch.bfloat16, requires_grad=True)
    with AllocationRecorder() as recorder:
        out = norm(x)
    assert recorder.live - out.nbytes == 100 * 4


def test_any_angles_rotate_as_in_transformers():
    torch.manual_seed(0)
    cos, sin = torch.randn(2, 1, 5, 8)
    first = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)  # of queries and keys
    found = []
    for rotate in (apply_rotary_pos_emb, own_passes.rotated):
        q, k = (tensor.clone().requires_grad_() for tensor in first)
        turned = rotate(q, k, cos, sin)
        torch.cat(turned, dim=1).pow(2).sum().backward()
        found.append((*turned, q.grad, k.grad))
    for theirs, ours in zip(*found, strict=True):
        assert_same_tensor(ours, theirs, summed(2 * 4))  # two products and an addition, there and back
