import random

import pytest

from sft_play.data.batching import FILLER, epoch_order, padded_rows, schedule, steps_per_epoch

RNG = random.Random(1)
LENGTHS = [RNG.randint(1, 500) for _ in range(1003)]


@pytest.mark.parametrize("group", [True, False])
@pytest.mark.parametrize("rows_per_step", [1, 7, 16, 2000])
def test_each_row_is_learned_once_an_epoch_and_filler_only_ends_a_step(group, rows_per_step):
    order = epoch_order(LENGTHS, rows_per_step, seed=0, epoch=0, group_by_length=group)
    assert sorted(row for row in order if row != FILLER) == list(range(len(LENGTHS)))
    assert len(order) == steps_per_epoch(len(LENGTHS), rows_per_step) * rows_per_step
    for start in range(0, len(order), rows_per_step):
        step = order[start : start + rows_per_step]
        assert step.count(FILLER) < rows_per_step
        assert FILLER not in step[: rows_per_step - step.count(FILLER)]


def test_epochs_and_seeds_differ_and_repeat():
    assert epoch_order(LENGTHS, 8, 0, 0, True) == epoch_order(LENGTHS, 8, 0, 0, True)
    assert epoch_order(LENGTHS, 8, 0, 0, True) != epoch_order(LENGTHS, 8, 0, 1, True)
    assert epoch_order(LENGTHS, 8, 0, 0, True) != epoch_order(LENGTHS, 8, 1, 0, True)


def test_grouping_by_length_saves_most_of_the_padding():
    def padded_share(group: bool) -> float:
        order = epoch_order(LENGTHS, 16, 0, 0, group)
        steps = [[LENGTHS[r] for r in order[i : i + 16] if r != FILLER] for i in range(0, len(order), 16)]
        return 1 - sum(map(sum, steps)) / sum(max(step) * len(step) for step in steps)

    assert padded_share(True) < 0.15 < 0.4 < padded_share(False)


def test_schedule_goes_on_over_epochs_and_stops_at_the_last_step():
    flat = schedule(LENGTHS, 10, total_steps=150, seed=0, group_by_length=False)
    assert len(flat) == 1500
    assert flat[:1010] == epoch_order(LENGTHS, 10, 0, 0, False)
    assert flat[1010:] == epoch_order(LENGTHS, 10, 0, 1, False)[:490]


def test_no_rows_is_an_error():
    with pytest.raises(ValueError, match="no rows"):
        schedule([], 4, 1, 0, False)


def test_evaluation_rows_are_filled_up_to_a_multiple():
    assert padded_rows(5, 4) == [0, 1, 2, 3, 4, FILLER, FILLER, FILLER]
    assert padded_rows(4, 4) == [0, 1, 2, 3]


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize(("micro", "accumulation"), [(1, 1), (3, 1), (2, 5), (4, 3)])
@pytest.mark.parametrize("rows", [1, 23, 96, 101])
def test_every_row_reaches_one_process_once_an_epoch_whatever_their_number(world_size, micro, accumulation, rows):
    """Micro-batches are dealt in turn, as accelerate does; the remainder of an epoch need not divide anything."""
    per_step = micro * accumulation * world_size
    epochs = 2
    steps = epochs * steps_per_epoch(rows, per_step)
    flat = schedule(LENGTHS[:rows], per_step, steps, seed=3, group_by_length=True)
    batches = [flat[i : i + micro] for i in range(0, len(flat), micro)]
    dealt = [batches[rank::world_size] for rank in range(world_size)]
    assert {len(own) for own in dealt} == {steps * accumulation}  # nobody waits for a rank that has run out
    per_epoch = steps // epochs * accumulation
    for epoch in range(epochs):
        seen = [row for own in dealt for batch in own[epoch * per_epoch : (epoch + 1) * per_epoch] for row in batch]
        assert sorted(row for row in seen if row != FILLER) == list(range(rows))
        assert seen.count(FILLER) == -rows % per_step
