import numpy as np
import pytest

from sft_play.data.batching import (
    FILLER,
    Share,
    deal,
    deal_alike,
    draw_steps,
    epoch_rows,
    make_schedule,
    row_costs,
    row_weights,
    rows_per_epoch,
    steps_per_epoch,
)

RNG = np.random.default_rng(1)
LENGTHS = RNG.integers(1, 500, 1003)


def schedule_of(lengths=LENGTHS, **changes):
    settings = {"rows_per_step": 16, "bins_per_step": 4, "total_steps": 63, "seed": 0, "hidden_size": 64}
    return make_schedule(lengths, **settings | changes)


@pytest.mark.parametrize("rows_per_step", [1, 7, 16, 2000])
def test_each_row_is_learned_once_an_epoch_and_filler_only_ends_a_step(rows_per_step):
    steps = steps_per_epoch(1003, rows_per_step)
    drawn = draw_steps([Share(1003)], rows_per_step, steps, seed=0)
    assert drawn.shape == (steps, rows_per_step)
    assert sorted(drawn[drawn != FILLER]) == list(range(1003))
    assert (drawn[:-1] != FILLER).all() and (np.diff(drawn[-1] == FILLER) >= 0).all()


@pytest.mark.parametrize("weight", [1, 2, 0.5, 0.3, 2.25, 1e-9])
@pytest.mark.parametrize("rows", [1, 7, 100])
def test_weights_are_kept_in_each_epoch_and_evened_out_over_epochs(rows, weight):
    shares = [Share(5), Share(rows, weight), Share(3, 3)]
    seen = np.zeros(rows, int)
    for epoch in range(20):
        counts = np.bincount(epoch_rows(shares, epoch, seed=0), minlength=8 + rows)
        assert (counts[:5] == 1).all() and (counts[-3:] == 3).all()
        own = counts[5:-3]
        assert own.sum() == max(1, int(rows * weight + 0.5)) and np.ptp(own) <= 1
        seen += own
        assert np.ptp(seen) <= 1
    assert np.allclose(row_weights(shares)[5:-3], own.sum() / rows)


def test_the_rows_of_a_mixed_epoch_are_all_learned_in_one_random_order():
    shares = [Share(100), Share(50, 2.5)]
    steps = steps_per_epoch(225, 16)
    assert rows_per_epoch(shares) == 225
    drawn = draw_steps(shares, 16, 2 * steps, seed=0)
    for epoch in range(2):
        own = drawn[epoch * steps : (epoch + 1) * steps]
        assert sorted(own[own != FILLER]) == sorted(epoch_rows(shares, epoch, seed=0))
    assert (draw_steps(shares, 16, steps, seed=0) == drawn[:steps]).all()
    first_half, second_half = drawn[: steps // 2], drawn[steps // 2 : steps]
    assert abs((first_half >= 100).mean() - (second_half >= 100).mean()) < 0.2
    other_half = set(epoch_rows(shares, 0, seed=1)) ^ set(epoch_rows(shares, 0, seed=0))
    assert not other_half and (epoch_rows(shares, 0, 1) != epoch_rows(shares, 0, 0)).any()


def test_epochs_and_seeds_differ_and_repeat():
    both = draw_steps([Share(1003)], 8, 252, seed=0)
    assert (draw_steps([Share(1003)], 8, 126, seed=0) == both[:126]).all()
    assert (both[:126] != both[126:]).any() and (
        draw_steps([Share(1003)], 8, 126, seed=1) != both[:126]
    ).any()


def test_a_run_stops_at_its_last_step_in_the_middle_of_an_epoch():
    assert len(draw_steps([Share(100)], 10, 17, seed=0)) == 17


def test_no_rows_is_an_error():
    with pytest.raises(ValueError, match="no rows"):
        draw_steps([], 4, 1, 0)


def test_a_long_row_costs_more_than_its_tokens():
    short, long = row_costs(np.array([100, 1000]), hidden_size=64)
    assert long > 10 * short
    assert row_costs(np.array([100]), hidden_size=8192) == pytest.approx(100, rel=2e-3)


@pytest.mark.parametrize("bins", [1, 2, 3, 5, 16])
def test_bins_are_balanced_within_a_third_of_the_best_possible(bins):
    """Graham's bound: 4/3 of the optimum, which is at least the mean and the largest single cost."""
    costs = RNG.integers(1, 500, (200, 16)).astype(float)
    loads = np.stack([(costs * (deal(costs, bins) == number)).sum(axis=1) for number in range(bins)], axis=1)
    best = np.maximum(costs.sum(axis=1) / bins, costs.max(axis=1))
    assert (loads.max(axis=1) <= 4 / 3 * best + 1e-9).all()
    assert (loads.sum(axis=1) == costs.sum(axis=1)).all()


def test_padded_bins_hold_equally_many_rows_of_similar_length():
    costs = np.array([[5.0, 400.0, 7.0, 390.0]])
    assert deal_alike(costs, 2).tolist() == [[1, 0, 1, 0]]


@pytest.mark.parametrize("padding_free", [True, False])
@pytest.mark.parametrize("bins", [1, 3, 4, 16])
@pytest.mark.parametrize("rows", [1, 23, 96, 101])
def test_every_row_is_in_one_micro_batch_an_epoch_whatever_their_number(rows, bins, padding_free):
    epochs, per_epoch = 2, steps_per_epoch(rows, 16)
    schedule = schedule_of(
        LENGTHS[:rows], bins_per_step=bins, total_steps=epochs * per_epoch, padding_free=padding_free
    )
    values, offsets = schedule.micro_batches()
    batches = np.split(values, offsets[1:-1])
    assert len(batches) == epochs * per_epoch * bins  # nobody waits for a rank that has run out
    assert all(len(batch) for batch in batches)
    for epoch in range(epochs):
        seen = np.concatenate(batches[epoch * per_epoch * bins : (epoch + 1) * per_epoch * bins])
        assert sorted(seen[seen != FILLER]) == list(range(rows))


@pytest.mark.parametrize("bins", [1, 2, 16])
def test_a_step_has_the_same_rows_however_it_is_dealt(bins):
    shares = [Share(3, 40), Share(1000, 0.75)]
    whole, other = (schedule_of(bins_per_step=number, shares=shares) for number in (4, bins))
    assert (whole.rows == other.rows).all()
    values, offsets = other.micro_batches()
    for step, batch in enumerate(np.split(values, offsets[bins:-1:bins])):  # repeated rows count each time
        assert sorted(batch[batch != FILLER]) == sorted(whole.rows[step][whole.rows[step] != FILLER])
    assert (whole.sums(LENGTHS).sum(axis=1) == other.sums(LENGTHS).sum(axis=1)).all()


def test_sums_and_padding_are_those_of_the_micro_batches():
    schedule = schedule_of(LENGTHS[:101], total_steps=7)
    values, offsets = schedule.micro_batches()
    batches = [batch[batch != FILLER] for batch in np.split(values, offsets[1:-1])]
    assert schedule.sums(LENGTHS).ravel().tolist() == [LENGTHS[batch].sum() for batch in batches]
    padded = [len(batch) * -(-max(LENGTHS[batch], default=0) // 8) * 8 for batch in batches]
    assert schedule.padded_tokens(LENGTHS).ravel().tolist() == padded


def test_more_bins_than_rows_are_filled_with_a_row_that_no_loss_sees():
    values, offsets = schedule_of([5, 3, 9], rows_per_step=2, bins_per_step=3, total_steps=2).micro_batches()
    assert (values == FILLER).sum() == 1 + 2 and len(offsets) == 7
