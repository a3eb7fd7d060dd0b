"""What we change in bitsandbytes; that imports leave the compiler out, ranks of tests/integration assert."""

import torch
from bitsandbytes.nn import Linear4bit

from sft_play.upstream import bitsandbytes as ours


def test_a_function_is_compiled_once_when_it_is_called(monkeypatch):
    found = []
    monkeypatch.setattr(torch, "compile", lambda function, **settings: found.append(settings) or function)
    double = ours._when_called(lambda number: 2 * number, dynamic=False)
    assert found == []
    assert [double(2), double(3)] == [4, 6] and found == [{"dynamic": False}]


def test_a_4_bit_product_saves_its_weight_itself():
    """So that what ZeRO-3 puts into the weight and takes out again goes, and the gradient is the same."""
    torch.manual_seed(0)
    layer = Linear4bit(64, 32, compute_dtype=torch.float32).to("cpu")
    inputs = torch.randn(3, 64)

    def gradient() -> tuple[torch.Tensor, torch.Tensor]:
        given = inputs.clone().requires_grad_()
        product = layer(given).grad_fn
        saved = product.tensors[1]
        layer(given).square().sum().backward()
        return given.grad, saved

    expected, view = gradient()
    with ours.weights_saved_themselves():
        found, saved = gradient()
    assert torch.equal(found, expected)
    assert saved is layer.weight and view is not layer.weight
