from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest

from sft_play.data.batching import (
    FILLER,
    Share,
    deal,
    deal_padded,
    draw_steps,
    epoch_rows,
    make_schedule,
    row_costs,
    row_weights,
    rows_per_epoch,
    steps_per_epoch,
)
from sft_play.planning.candidates.batch import BatchSplit
from sft_play.planning.rows.described_rows import Lengths

RNG = np.random.default_rng(1)
LENGTHS = RNG.integers(1, 500, 1003)


def schedule_of(lengths=LENGTHS, **changes):
    settings = {"rows_per_step": 16, "total_steps": 63, "seed": 0, "hidden_size": 64}
    return make_schedule(lengths, **settings | {"accumulation": 2, "data_ranks": 2} | changes)


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


@pytest.mark.parametrize(("accumulation", "ranks"), [(1, 1), (2, 1), (5, 1), (1, 3), (1, 16), (4, 3)])
def test_loads_are_balanced_within_a_third_of_the_best_possible(accumulation, ranks):
    """Graham's bound: 4/3 of the optimum, which is at least the mean and the largest single cost."""
    tokens = RNG.integers(1, 500, (200, 16))
    costs = tokens.astype(float)
    loads = loads_of(deal(costs, tokens, accumulation, ranks), costs, accumulation, ranks)
    of_all = loads.sum(axis=1) if ranks > 1 else loads[:, :, 0]  # of each rank, or of each micro-batch
    best = np.maximum(costs.sum(axis=1) / of_all.shape[1], costs.max(axis=1))
    assert (of_all.max(axis=1) <= 4 / 3 * best + 1e-9).all()
    assert (of_all.sum(axis=1) == costs.sum(axis=1)).all()


def loads_of(dealt, costs, accumulation, ranks):
    """Of each micro-batch, [steps, turns, ranks]."""
    bins = range(accumulation * ranks)
    loads = [np.where(dealt == number, costs, 0).sum(axis=1) for number in bins]
    return np.stack(loads, axis=1).reshape(-1, accumulation, ranks)


def test_a_micro_batch_is_filled_up_to_the_tokens_of_another_rank_in_its_turn():
    tokens = np.array([[1, 80, 30, 20, 10, 40, 0]])
    dealt = deal(tokens.astype(float), tokens, accumulation=2, ranks=2)
    assert dealt.tolist() == [[2, 0, 1, 3, 2, 1, FILLER]]


def test_padded_bins_hold_rows_of_similar_length_and_cost_alike():
    costs = np.array([[5.0, 400.0, 7.0, 390.0], [100.0, 9.0, 50.0, 40.0], [0.0, 3.0, 0.0, 2.0]])
    dealt = deal_padded(costs, accumulation=2, ranks=1)
    assert dealt.tolist() == [[1, 0, 1, 0], [1, 0, 0, 0], [FILLER, 0, FILLER, 1]]
    dealt = deal_padded(np.array([[8.0, 1.0, 4.0, 2.0]]), accumulation=2, ranks=2)
    assert dealt.tolist() == [[0, 2, 1, 3]]  # the first rank has the fullest and the emptiest


def fullest_of_padded(costs, bins):
    """The smallest fullest bin, by trying where each begins."""
    falling = sorted(costs, reverse=True)
    starts = combinations(range(1, len(falling)), min(bins, len(falling)) - 1)
    ends = ([0, *inner, len(falling)] for inner in starts)
    return min(max((b - a) * falling[a] for a, b in pairwise(each)) for each in ends)


@pytest.mark.parametrize("bins", [1, 2, 3, 5, 9])
def test_the_fullest_padded_bin_is_as_small_as_can_be(bins):
    costs = RNG.lognormal(6, 1, (40, 9))
    dealt = deal_padded(costs, bins, 1)
    for own, number in zip(costs, dealt, strict=True):
        held = [own[number == each] for each in range(bins)]
        assert min(map(len, held)) >= 1
        fullest = max(len(rows) * rows.max() for rows in held)
        assert fullest <= fullest_of_padded(own, bins) * (1 + 9 / 256)


@pytest.mark.parametrize("padding_free", [True, False])
@pytest.mark.parametrize(("bins", "ranks"), [(1, 1), (3, 1), (3, 3), (4, 2), (16, 2), (15, 5)])
@pytest.mark.parametrize("rows", [1, 23, 96, 101])
def test_every_row_is_in_one_micro_batch_an_epoch_whatever_their_number(rows, bins, ranks, padding_free):
    epochs, per_epoch = 2, steps_per_epoch(rows, 16)
    schedule = schedule_of(
        LENGTHS[:rows],
        accumulation=bins // ranks,
        data_ranks=ranks,
        total_steps=epochs * per_epoch,
        padding_free=padding_free,
    )
    values, offsets = schedule.micro_batches()
    batches = np.split(values, offsets[1:-1])
    assert len(batches) == epochs * per_epoch * bins  # nobody waits for a rank that has run out
    assert all(len(batch) for batch in batches)
    for epoch in range(epochs):
        seen = np.concatenate(batches[epoch * per_epoch * bins : (epoch + 1) * per_epoch * bins])
        assert sorted(seen[seen != FILLER]) == list(range(rows))


@pytest.mark.parametrize("split", [(1, 1), (1, 2), (8, 2)])
def test_a_step_has_the_same_rows_however_it_is_dealt(split):
    shares = [Share(3, 40), Share(1000, 0.75)]
    whole, other = (
        schedule_of(accumulation=accumulation, data_ranks=ranks, shares=shares)
        for accumulation, ranks in ((2, 2), split)
    )
    bins = split[0] * split[1]
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
    schedule = schedule_of([5, 3, 9], rows_per_step=2, accumulation=1, data_ranks=3, total_steps=2)
    values, offsets = schedule.micro_batches()
    assert (values == FILLER).sum() == 1 + 2 and len(offsets) == 7


@pytest.mark.parametrize("spread", [0.1, 0.5, 1])
@pytest.mark.parametrize(("accumulation", "ranks"), [(2, 8), (4, 4), (3, 5)])
def test_ranks_wait_less_for_each_other_than_if_each_micro_batch_had_as_much(accumulation, ranks, spread):
    tokens = RNG.lognormal(5, spread, (300, 2 * accumulation * ranks)).astype(int) + 1
    costs = row_costs(tokens, 64)
    alike = deal(costs, tokens, accumulation * ranks, 1)  # no rank is known
    before, after = (
        loads_of(dealt, tokens, accumulation, ranks)
        for dealt in (alike, deal(costs, tokens, accumulation, ranks))
    )
    assert after.max() <= 1.02 * before.max()
    assert after.sum(axis=1).max(axis=1).sum() < before.sum(axis=1).max(axis=1).sum()
    assert after.max(axis=2).sum() <= 1.02 * before.max(axis=2).sum()


def test_what_dealing_saves_is_what_its_decision_says():
    """docs/decisions/0002, of rows whose lengths spread as those of plans without data."""
    lengths = Lengths(1500, 4500).draw(3000, 0)
    drawn = schedule_of(
        lengths, total_steps=187, hidden_size=4096, accumulation=4, data_ranks=1, padding_free=False
    )
    alike = replace(
        drawn, bins=np.argsort(np.argsort(-lengths[drawn.rows], axis=1, kind="stable"), axis=1) // 4
    )
    for schedule, largest, padding in ((alike, 46_528, 0.23), (drawn, 15_840, 0.16)):
        tokens = schedule.padded_tokens(lengths)
        assert tokens.max() == largest and round(1 - lengths[drawn.rows].sum() / tokens.sum(), 2) == padding
    for rows, accumulation, ranks, before, after in ((16, 2, 8, 1.76, 1.40), (64, 4, 16, 1.59, 1.09)):
        split = dict(accumulation=accumulation, data_ranks=ranks)
        turned = schedule_of(lengths, rows_per_step=rows, total_steps=3000 // rows, hidden_size=4096, **split)
        tokens = lengths[turned.rows]
        plain = replace(turned, bins=deal(row_costs(tokens, 4096), tokens, accumulation * ranks, 1))
        for schedule, busiest in ((plain, before), (turned, after)):
            sums = schedule.sums(lengths)
            waited = BatchSplit(rows, accumulation, ranks).busiest(sums, sums.sum())
            assert round(waited[0], 2) == busiest
