"""The types that CUDA's autocast gives results, given on a CPU."""

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from sft_play.sizing.kernels.simulation import CHANGED, cuda_autocast

# cast before they compute, or whose result is: autocast_mode.h of PyTorch
CAST = {
    "function": lambda values: torch.exp(values),
    "method": lambda values: values.rsqrt(),
    "operator": lambda values: values**2,
    "sum": lambda values: values.sum(-1),
    "softmax": lambda values: functional.softmax(values, dim=-1),
    "norm": lambda values: functional.layer_norm(values, values.shape[-1:]),
}
NOT_CAST = {"silu": functional.silu, "relu": torch.relu, "mean": torch.mean, "add": lambda values: values + 1}


@pytest.fixture
def values():
    return torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=True)


@pytest.fixture
def on_cuda():
    with torch.autocast("cpu", torch.bfloat16), cuda_autocast():
        yield


@pytest.mark.parametrize("name", CAST)
def test_what_cuda_computes_in_fp32_is_fp32(name, values, on_cuda):
    assert CAST[name](values).dtype == torch.float32


@pytest.mark.parametrize("name", NOT_CAST)
def test_all_else_keeps_its_type(name, values, on_cuda):
    assert NOT_CAST[name](values).dtype == torch.bfloat16


def test_each_function_is_there_to_be_replaced():
    owners = torch, functional, torch.Tensor
    assert not [name for name in CHANGED if not any(hasattr(owner, name) for owner in owners)]


def test_a_type_that_is_asked_for_stays(values, on_cuda):
    assert values.sum(dtype=torch.bfloat16).dtype == torch.bfloat16


def test_what_is_recomputed_is_cast_too(values, on_cuda):
    checkpoint(lambda given: torch.exp(given).sum(), values, use_reentrant=False).backward()
    assert values.grad is not None and values.grad.dtype == torch.bfloat16


def test_without_autocast_nothing_is_cast_and_afterwards_functions_are_pytorchs(values):
    owners = torch, functional, torch.Tensor
    before = [dict(vars(owner)) for owner in owners]
    with cuda_autocast():
        assert torch.exp(values).dtype == values.sum().dtype == torch.bfloat16
    assert [dict(vars(owner)) for owner in owners] == before
