"""Tolerances of comparisons between two orders of summation, from the type and the length of the sums."""

from collections.abc import Callable, Iterable

import torch

observers: list[Callable[[float], None]] = []  # told the share of what is allowed that a difference takes


def summed(terms: int, dtype: torch.dtype = torch.float32) -> float:
    """How far two orders of summation of `terms` numbers may differ: sqrt(terms) * eps of their magnitude.

    Each addition rounds by at most eps/2 of the partial sum that it makes. Roundings are independent and spread
    evenly, so the error of one order has a standard deviation of sqrt(terms) * eps/6 of the sum, if all terms
    have one sign (partial sums grow evenly), and of sqrt(terms) * eps/5 of the root mean square of such sums, if
    signs are random (both the sums and the partial sums grow as square roots). The difference of two orders is
    sqrt(2) of that: the tolerance is at least 3 standard deviations of a number, and 3 times the expected norm of
    the difference of many. Kernels that keep several partial sums at once are nearer. Sums of which one is the
    input of the next add up: their terms are counted together.

    It is 5e-6 for 2,000 terms in fp32. Real errors are more than five times above: a term that is left out, a scale
    that is wrong by a hundredth, bf16 in the place of fp32 (tests/unit/test_rounding.py). The nearest that is known
    is Adam without one of its moments or with a wrong count of steps, 2e-5 of a loss curve: six times what the 768
    tokens of a step allow (tests/integration/test_many_processes.py).

    Args:
        terms: number of additions that make the result.
        dtype: in which it is added.
    """
    return terms**0.5 * torch.finfo(dtype).eps


def forward_terms(model: torch.nn.Module, tokens: int) -> int:
    """Number of terms of the sums that a logit goes through, one after the other.

    The rows of all matrices; those that run side by side, as queries and keys, are counted one by one. In each
    layer the denominator and the values of the attention.

    Args:
        model: with unquantized weights, and any adapter.
        tokens: length of the sequence.
    """
    rows = sum(weight.shape[-1] for weight in model.parameters() if weight.dim() > 1)
    return rows + 2 * tokens * model.config.get_text_config().num_hidden_layers


def step_terms(model: torch.nn.Module, tokens: int) -> int:
    """The same of a gradient: forward, the softmax of the loss, backward, and the tokens that it is summed over.

    Args:
        model: with unquantized weights, and any adapter.
        tokens: in the batch.
    """
    return 2 * forward_terms(model, tokens) + model.config.get_text_config().vocab_size + tokens


def assert_within(difference: float, allowed: float) -> None:
    """A difference is at most what is allowed; NaN is not."""
    assert difference <= allowed, f"{difference:.4g} is more than {allowed:.4g}"
    for tell in observers:
        tell(difference / allowed if allowed else 0.0)


def assert_same_values(found: Iterable[float], expected: Iterable[float], tolerance: float) -> None:
    """Each number is another, relative to itself.

    Args:
        found: numbers.
        expected: as many.
        tolerance: relative, as of summed().
    """
    for ours, theirs in zip(found, expected, strict=True):
        assert_within(abs(ours - theirs), tolerance * abs(theirs))


def assert_same_tensor(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Each element is that of another tensor, relative to the largest: small elements are sums that cancel.

    Args:
        found: any shape.
        expected: of the same shape and type.
        tolerance: relative, as of summed().
    """
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    worst = (found.detach().double() - expected.detach().double()).abs().max()
    assert_within(float(worst), tolerance * float(expected.detach().abs().max()))


def assert_same_norm(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """The norm of a difference, relative to that of the tensor: one bound for many elements.

    Args:
        found: any shape.
        expected: of the same shape.
        tolerance: relative, as of summed().
    """
    assert found.shape == expected.shape
    difference = found.detach().double() - expected.detach().double()
    assert_within(float(difference.norm()), tolerance * float(expected.detach().double().norm()))
