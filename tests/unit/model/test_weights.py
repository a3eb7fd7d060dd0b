import math

import pytest
import torch

from sft_play.model.weights.finished import first_not_finite


def named(*tensors):
    return [(f"w{number}", tensor) for number, tensor in enumerate(tensors)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_first_tensor_with_a_value_that_is_not_finite_is_named(value, dtype):
    broken = torch.ones(3, 5, dtype=dtype)
    broken[1, 2] = value
    assert first_not_finite(named(torch.ones(4), broken, broken.clone())) == "w1"


def test_infinities_that_cancel_are_found():
    assert first_not_finite(named(torch.tensor([math.inf, -math.inf]))) == "w0"


def test_finite_weights_pass_even_if_their_sum_overflows():
    large = torch.full((8,), 3e38)
    assert first_not_finite(named(large, torch.full((100_000,), 60_000.0, dtype=torch.float16))) is None
    assert first_not_finite([]) is None and first_not_finite(named(torch.tensor([1, 2]))) is None
