"""Counting skipped steps, and the record that is logged without them."""

import math

import pytest
import torch

from sft_play.errors import NonFiniteError
from sft_play.train.nonfinite import SkippedSteps, check_weights, poisoned_if_not_finite


def test_the_logged_loss_is_the_mean_of_the_steps_that_count():
    steps = SkippedSteps(limit=3)
    for finite in (True, False, True, True):
        steps.count(finite=finite)
    logs = {"loss": (1.0 + 0.0 + 2.0 + 3.0) / 4, "grad_norm": 0.5}
    assert steps.corrected(logs) == {"loss": pytest.approx(2.0), "grad_norm": 0.5}
    steps.count(finite=True)
    assert steps.corrected({"loss": 4.0, "grad_norm": 0.5}) == {"loss": 4.0, "grad_norm": 0.5}
    assert (steps.total, steps.in_a_row) == (1, 0)


def test_a_record_of_skipped_steps_alone_has_no_loss():
    steps = SkippedSteps(limit=3)
    steps.count(finite=False)
    assert steps.corrected({"loss": 0.0, "grad_norm": math.inf, "epoch": 1}) == {"epoch": 1}
    assert steps.in_a_row == 1


def test_the_message_names_a_few_rows():
    steps = SkippedSteps(limit=2)
    steps.count(finite=False)
    said = steps.message(7, [f"row {number}" for number in range(5)])
    assert said.startswith("step 7 was skipped") and "(1 in a row; 2 end the run)" in said
    assert said.endswith("row 0, row 1, row 2 and 2 more")


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_loss_that_is_not_finite_gives_gradients_that_are_not(value):
    weight = torch.ones(2, requires_grad=True)
    poisoned_if_not_finite(weight.sum() + value).backward()
    assert not torch.isfinite(weight.grad).any()


def test_a_finite_loss_stays_as_it_is_to_the_bit():
    weight = torch.randn(100, requires_grad=True)
    plain = torch.autograd.grad((weight**2).sum(), weight)[0]
    loss = (weight**2).sum()
    assert poisoned_if_not_finite(loss).item() == loss.item()
    assert torch.equal(torch.autograd.grad(poisoned_if_not_finite(loss), weight)[0], plain)


def test_only_trained_weights_are_checked():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].weight.requires_grad_(False).fill_(math.inf)
    check_weights(model)
    with torch.no_grad():
        model[1].bias[0] = math.nan
    with pytest.raises(NonFiniteError, match="the trained weight 1.bias is NaN or infinite"):
        check_weights(model)
