"""The tolerance between two orders of summation holds every order, and no real error."""

import numpy as np
import pytest
import torch

from tests.rounding import (
    assert_same_norm,
    assert_same_tensor,
    assert_same_values,
    summed,
)

SUMS, TERMS = 200, 2000


def in_order(numbers: np.ndarray) -> torch.Tensor:
    """Sums of the rows in fp32, term by term: (sums, terms) to (sums,)."""
    return torch.from_numpy(np.cumsum(numbers, axis=1, dtype=np.float32)[:, -1].copy())


@pytest.fixture(params=["one sign", "random signs"])
def numbers(request):
    drawn = np.random.default_rng(0).standard_normal((SUMS, TERMS)).astype(np.float32)
    return np.abs(drawn) if request.param == "one sign" else drawn


def test_orders_of_summation_are_within_it(numbers):
    forwards = in_order(numbers)
    for other in (in_order(numbers[:, ::-1]), torch.from_numpy(numbers).sum(1)):
        assert_same_norm(other, forwards, summed(TERMS))
        assert_same_tensor(other, forwards, summed(TERMS))


def test_of_one_sign_each_sum_is_within_it():
    drawn = np.random.default_rng(1).random((SUMS, TERMS)).astype(np.float32)
    assert_same_values(in_order(drawn).tolist(), in_order(drawn[:, ::-1]).tolist(), summed(TERMS))


def test_real_errors_are_above_it(numbers):
    whole = in_order(numbers)
    wrong = {
        "a term is left out": in_order(numbers[:, 1:]),
        "a scale is wrong by a hundredth": whole * 1.01,
        "bf16": torch.from_numpy(numbers).bfloat16().float().sum(1),
        "not a number": whole * torch.nan,
    }
    for compare in (assert_same_norm, assert_same_tensor):
        for what, found in wrong.items():
            try:
                compare(found, whole, 5 * summed(TERMS))
            except AssertionError:
                continue
            pytest.fail(f"{what}: {compare.__name__} accepts it")
