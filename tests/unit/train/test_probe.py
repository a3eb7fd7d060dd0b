"""How long an average step takes, from the two micro-batches that a probe times."""

from types import SimpleNamespace

import pytest
import torch

from sft_play.train.probe import _average_step, _Clock
from tests.plans import plan_with
from tests.unit.train.plans import PLAN


def average(accumulation: int, first: float | None, step: float, tokens: int = 100) -> float:
    """Seconds of a step that has micro-batches of 100 tokens, of which the probe timed at most two."""
    plan = plan_with(PLAN, gradient_accumulation_steps=accumulation)
    rows = SimpleNamespace(tokens_per_step=[tokens * accumulation], padding_share=0.0)
    clock = _Clock(lambda phase: None, torch.device("cpu"))
    clock.first, clock.seconds = first, step
    return _average_step(SimpleNamespace(job=SimpleNamespace(plan=plan), rows=rows), clock, [100, 100])


def test_what_comes_once_a_step_is_not_multiplied():
    assert average(2, 1.0, 2.5) == pytest.approx(2.5)
    assert average(16, 1.0, 2.5) == pytest.approx(16.5)


def test_only_the_micro_batches_shrink_with_the_tokens_of_an_average_step():
    assert average(16, 1.0, 2.5, tokens=50) == pytest.approx(8.5)
    assert average(1, None, 2.0, tokens=50) == pytest.approx(1.0)


def test_a_first_micro_batch_that_was_disturbed_makes_nothing_negative():
    assert average(4, 2.0, 3.0) == pytest.approx(8.0)
