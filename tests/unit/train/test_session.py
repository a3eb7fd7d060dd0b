"""The schedule of a run."""

import pytest
import torch
from transformers import get_scheduler

from sft_play.config.train import TrainConfig
from sft_play.train.session import SCHEDULES, schedule_settings, warmup_steps


def rates(schedule: str, ratio: float, steps: int, decay: float = 0.2) -> list[float]:
    """The learning rates of the steps of a run, as transformers sets them, relative to the peak."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    train = TrainConfig(lr_schedule=schedule, warmup_ratio=ratio, decay_ratio=decay)
    settings = schedule_settings(train, steps)
    scheduler = get_scheduler(
        SCHEDULES[schedule], optimizer, warmup_steps(ratio, steps), steps, scheduler_specific_kwargs=settings
    )
    found = []
    for _ in range(steps):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ratio", [0.0, 0.03, 0.5, 0.99])
@pytest.mark.parametrize("steps", [1, 2, 3, 10])
def test_a_run_learns_at_the_peak_rate_at_least_once(schedule, ratio, steps):
    assert max(rates(schedule, ratio, steps)) == 1.0


def test_a_rate_that_stays_falls_over_the_last_steps():
    assert rates("warmup_stable_decay", 0.2, 10, decay=0.3) == pytest.approx(
        [0, 0.5, 1, 1, 1, 1, 1, 1, 2 / 3, 1 / 3]
    )
    assert rates("warmup_stable_decay", 0.0, 4, decay=0.0) == [1, 1, 1, 1]
    assert rates("warmup_stable_decay", 0.5, 4, decay=0.9) == [0, 0.5, 1, 0.5]


def test_a_run_of_one_step_learns_and_longer_ones_warm_up_as_they_did():
    assert rates("cosine", 0.03, 1) == [1.0]
    assert rates("linear", 0.03, 2) == [0.0, 1.0]
    assert [warmup_steps(0.03, steps) for steps in (2, 33, 34, 1000)] == [1, 1, 2, 30]
