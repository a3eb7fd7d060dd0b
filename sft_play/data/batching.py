"""Decides which rows each micro-batch holds, for the whole run before it starts.

An optimizer step is a set of rows, the same on any number of processes: exactly `rows_per_step` of them,
drawn at random without replacement from the rows of the epoch, in which each row is once, or as often as the
weight of its source says; the last step of an epoch may have fewer. The rows of a step are dealt to
accumulation x world size micro-batches. Dealing changes neither what a step learns from nor, since the loss
is averaged over the supervised tokens of the step, what it learns; it only decides how even the micro-batches
are. Resuming means continuing in the schedule.

    step 0                                  step 1 ...
    rows {7, 2, 9, 4, 0, 5}                 (a set: no order inside)
    micro-batches [9, 2] [7] [4, 0, 5]      balanced by cost; consecutive ones go to the ranks in turn
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

Tokens = TypeVar("Tokens", int, np.ndarray)

FILLER = -1  # stands for a row without supervised tokens, which has no weight in the loss of its step

PAD_TO_MULTIPLE_OF = 8  # tokens: rows are padded to the next multiple of this
DEALT_AT_ONCE = 2**16  # rows: what is computed with them stays in the caches of a CPU
HALVINGS = 8  # of the interval in which the cost of the fullest bin of padded rows is sought


def padded_length(tokens: Tokens) -> Tokens:
    """The length to which the padding collator pads rows if the longest one has `tokens` tokens."""
    return -(-tokens // PAD_TO_MULTIPLE_OF) * PAD_TO_MULTIPLE_OF


@dataclass(frozen=True)
class Share:
    """Consecutive rows with the same weight: how often each of them is seen per epoch."""

    rows: int
    weight: float = 1.0

    @property
    def per_epoch(self) -> int:
        """How many of these rows an epoch has, repeats counted: rows x weight, rounded, and at least one."""
        return max(min(self.rows, 1), math.floor(self.rows * self.weight + 0.5))


def rows_per_epoch(shares: Sequence[Share]) -> int:
    """Number of rows that an epoch has, repeats counted."""
    return sum(share.per_epoch for share in shares)


def epoch_rows(shares: Sequence[Share], epoch: int, seed: int) -> np.ndarray:
    """The row indices of an epoch, [rows per epoch], in the order of `shares`.

    Whole repeats take each row. What is left over goes round a fixed random order of the rows, so that after
    any number of epochs, rows of the same share differ by at most one in how often they were seen.

    Example: weight 2.5 and 4 rows give each row twice and two of them once more; the next epoch takes the
    other two.
    """
    taken, first = [], 0
    for number, share in enumerate(shares):
        whole, rest = divmod(share.per_epoch, max(share.rows, 1))
        taken += [np.arange(first, first + share.rows)] * whole
        if rest:
            order = np.random.default_rng([seed, number, share.rows]).permutation(share.rows)
            taken.append(first + order[(epoch * rest + np.arange(rest)) % share.rows])
        first += share.rows
    return np.concatenate([np.zeros(0, np.int64), *taken])


def row_weights(shares: Sequence[Share]) -> np.ndarray:
    """How often each row is seen per epoch, on average over the epochs, [rows]."""
    sizes = [share.rows for share in shares]
    return np.repeat([share.per_epoch / max(share.rows, 1) for share in shares], sizes)


def steps_per_epoch(rows: int, rows_per_step: int) -> int:
    """Optimizer steps in which every row of an epoch is seen once."""
    return -(-rows // rows_per_step)


def draw_steps(shares: Sequence[Share], rows_per_step: int, total_steps: int, seed: int) -> np.ndarray:
    """The rows of each optimizer step, [total_steps, rows_per_step], epoch after epoch.

    The last step of an epoch is filled up with FILLER. Example: 5 rows in steps of 2 may give
    [[3, 0], [4, 1], [2, FILLER]].

    Raises:
        ValueError: there are no rows.
    """
    rows = rows_per_epoch(shares)
    if not rows:
        raise ValueError("there are no rows to train on")
    per_epoch = steps_per_epoch(rows, rows_per_step)
    epochs = []
    for epoch in range(-(-total_steps // per_epoch)):
        order = np.full(per_epoch * rows_per_step, FILLER)
        shuffled = np.random.default_rng([seed, epoch]).permutation(rows)
        order[:rows] = epoch_rows(shares, epoch, seed)[shuffled]
        epochs.append(order.reshape(per_epoch, rows_per_step))
    return np.concatenate(epochs)[:total_steps]


def row_costs(lengths: np.ndarray, hidden_size: int) -> np.ndarray:
    """Relative cost of rows, [rows]: linear in their tokens, [rows], plus the quadratic part of attention.

    A token is multiplied by about 12 h^2 weights in a decoder layer (h: hidden size; 4 h^2 in attention's
    projections, 8 h^2 in the feed-forward part) and, on average, attends to length / 2 earlier tokens with
    2 h products each, so attention adds length / (12 h).
    """
    return lengths * (1 + lengths / (12 * hidden_size))


def deal(costs: np.ndarray, tokens: np.ndarray, accumulation: int, ranks: int) -> np.ndarray:
    """Deals the rows of each step to micro-batches, `accumulation` turns of all ranks.

    The costliest row first, each goes to the rank that has least, so that the one with most exceeds the best
    possible by at most a third (Graham's longest-processing-time rule, 1969). There it goes to a micro-batch
    that has no more tokens with it than another rank's of the same turn, since ranks may wait for each other
    in each of them, or else to the emptiest. All steps are dealt at once.

    Args:
        costs: of the rows, [steps, rows]; 0 for fillers, as their tokens.
        tokens: of the rows, [steps, rows].
        accumulation: micro-batches of a rank.
        ranks: their number.

    Returns:
        The micro-batch of each row, [steps, rows], as turn x ranks + rank; FILLER for fillers.
    """
    steps, order = np.arange(len(costs)), np.argsort(-costs, axis=1, kind="stable")
    totals, largest = np.zeros((len(costs), ranks)), np.zeros((len(costs), accumulation), int)
    loads = np.zeros((len(costs) * ranks, accumulation))
    held = np.zeros(loads.shape, int)  # tokens
    numbers = np.empty(order.shape[::-1], int)
    falling = (np.take_along_axis(values, order, axis=1).T for values in (costs, tokens))
    for place, (cost, more) in enumerate(zip(*falling, strict=True)):
        rank = totals.argmin(axis=1)
        own = steps * ranks + rank
        room = largest - held[own]
        turn = room.argmax(axis=1)
        turn = np.where(room[steps, turn] >= more, turn, loads[own].argmin(axis=1))
        totals[steps, rank] += cost
        loads[own, turn] += cost
        held[own, turn] += more
        largest[steps, turn] = np.maximum(largest[steps, turn], held[own, turn])
        numbers[place] = np.where(cost > 0, turn * ranks + rank, FILLER)
    dealt = np.empty(order.shape, int)
    np.put_along_axis(dealt, order, numbers.T, axis=1)
    if ranks > 1:
        return _aligned(dealt, held.reshape(-1, ranks, accumulation))
    return dealt


def _aligned(dealt: np.ndarray, held: np.ndarray) -> np.ndarray:
    """The same with the turns of each rank in falling order of the tokens `held`, [steps, ranks, turns]."""
    ranks = held.shape[1]
    numbers = (_places(held) * ranks + np.arange(ranks)[:, None]).swapaxes(1, 2).reshape(len(held), -1)
    return np.where(dealt == FILLER, FILLER, np.take_along_axis(numbers, dealt, axis=1))


def _places(loads: np.ndarray) -> np.ndarray:
    """The place of each load among those of the last axis, the largest first."""
    return np.argsort(np.argsort(-loads, axis=-1, kind="stable"), axis=-1)


def deal_padded(costs: np.ndarray, accumulation: int, ranks: int) -> np.ndarray:
    """As `deal`, if each row of a micro-batch costs as much as its costliest: alike ones share one.

    The fullest one of a step is nearly as small as rows in falling order of cost allow. The fullest come
    first, when there are no gradients yet. Every second turn goes through the ranks the other way round, so
    that the first of them does not have the fullest of each.
    """
    bins = accumulation * ranks
    order = np.argsort(-costs, axis=1, kind="stable")
    falling = np.take_along_axis(costs, order, axis=1)
    least, enough = falling.sum(axis=1) / bins, -(-costs.shape[1] // bins) * falling[:, 0]
    for _ in range(HALVINGS):
        limit = (least + enough) / 2
        fits = np.where(falling > 0, _filled(falling, limit, bins), 0).max(axis=1) < bins
        least, enough = np.where(fits, least, limit), np.where(fits, limit, enough)
    filled = np.where(falling > 0, _filled(falling, enough, bins), 0)
    flat = filled + np.arange(len(costs))[:, None] * bins
    rows, fullest = np.zeros(len(costs) * bins), np.zeros(len(costs) * bins)
    np.add.at(rows, flat, falling > 0)
    np.maximum.at(fullest, flat, falling)
    turns = np.arange(bins).reshape(accumulation, ranks)
    turns[1::2] = turns[1::2, ::-1]
    numbers = turns.ravel()[_places((rows * fullest).reshape(-1, bins))]
    dealt = np.empty(costs.shape, int)
    np.put_along_axis(dealt, order, np.take_along_axis(numbers, filled, axis=1), axis=1)
    return np.where(costs > 0, dealt, FILLER)


def _filled(falling: np.ndarray, limit: np.ndarray, bins: int) -> np.ndarray:
    """Bins of rows in falling order of cost, [steps, rows]: as many in each as its `limit`, [steps], allows.

    No bin is left empty while another one has several rows. A small limit takes more than `bins`.
    """
    steps, width = falling.shape
    left = (falling > 0).sum(axis=1)
    current, held, costliest = np.zeros(steps, int), np.zeros(steps, int), falling[:, 0]
    found = np.empty(falling.shape, int)
    for row in range(width):
        full = (held + 1) * costliest > limit
        opens = (held > 0) & (full | (left - row < bins - current))
        current = current + opens
        held, costliest = np.where(opens, 1, held + 1), np.where(opens, falling[:, row], costliest)
        found[:, row] = current
    return found


@dataclass(frozen=True)
class Schedule:
    """The micro-batches of a run.

    `rows` and `bins` are [steps, rows per step]: the index of each row, and the bin that it is in.
    """

    rows: np.ndarray
    bins: np.ndarray
    bins_per_step: int

    @cached_property
    def _sorted(self) -> tuple[np.ndarray, np.ndarray]:
        """Row indices grouped by micro-batch, [steps x rows], and the rows of each, [steps x bins]."""
        steps = np.arange(len(self.rows))[:, None] * self.bins_per_step
        number = np.where(self.bins == FILLER, -1, self.bins + steps).ravel()
        order = np.argsort(number, kind="stable")
        order = order[np.searchsorted(number[order], 0) :]
        counts = np.bincount(number[order], minlength=len(self.rows) * self.bins_per_step)
        return self.rows.ravel()[order], counts

    def micro_batches(self) -> tuple[np.ndarray, np.ndarray]:
        """Row indices of all micro-batches, as values [rows] and offsets [micro-batches + 1] of a list array.

        A micro-batch without rows holds one FILLER.
        """
        rows, counts = self._sorted
        ends = np.cumsum(counts)
        filled = np.insert(rows, ends[counts == 0], FILLER)
        return filled, np.concatenate([[0], np.cumsum(np.maximum(counts, 1))])

    def sums(self, values: np.ndarray) -> np.ndarray:
        """The sum over each micro-batch of a value per row, [steps, bins]."""
        rows, counts = self._sorted
        summed = np.concatenate([[0], np.cumsum(values[rows])])
        ends = np.cumsum(counts)
        return (summed[ends] - summed[ends - counts]).reshape(-1, self.bins_per_step)

    def padded_tokens(self, lengths: np.ndarray) -> np.ndarray:
        """Tokens of each micro-batch if its rows are padded to the longest of them, [steps, bins]."""
        rows, counts = self._sorted
        starts = np.cumsum(counts) - counts
        longest = np.zeros(len(counts), dtype=np.int64)
        held = counts > 0
        longest[held] = np.maximum.reduceat(lengths[rows], starts[held])
        return (counts * padded_length(longest)).reshape(-1, self.bins_per_step)


def make_schedule(
    lengths: Sequence[int] | np.ndarray,
    *,
    rows_per_step: int,
    accumulation: int,
    data_ranks: int,
    total_steps: int,
    seed: int,
    hidden_size: int,
    padding_free: bool = True,
    shares: Sequence[Share] | None = None,
) -> Schedule:
    """Draws the rows of each step, from the tokens of all rows, [rows], and deals them to micro-batches.

    A step has `accumulation` of these for each of the data ranks: processes, or groups of them that divide
    one. With `padding_free`, the rows of one are joined; otherwise they are padded to the longest. Without
    `shares`, an epoch has each row once.

    Raises:
        ValueError: there are no rows.
    """
    lengths = np.asarray(lengths)
    rows = draw_steps(shares or [Share(len(lengths))], rows_per_step, total_steps, seed)
    dealt, steps = np.empty_like(rows), max(1, DEALT_AT_ONCE // rows_per_step)
    for first in range(0, len(rows), steps):
        own = rows[first : first + steps]
        tokens = np.where(own == FILLER, 0, lengths[own])
        if padding_free:
            found = deal(row_costs(tokens, hidden_size), tokens, accumulation, data_ranks)
        else:
            found = deal_padded(row_costs(padded_length(tokens), hidden_size), accumulation, data_ranks)
        dealt[first : first + steps] = found
    return Schedule(rows, dealt, accumulation * data_ranks)


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Groups row indices so that the lengths of each group sum to at most `capacity`.

    Best-fit decreasing, the classic bin-packing heuristic (Johnson 1974): rows are placed longest first, each
    into the fullest group that still has room. The result is deterministic, and rows of a group keep their
    order.

    Example: `pack([5, 3, 3, 2], 8)` is `[[0, 1], [2, 3]]`.

    Raises:
        ValueError: a row is longer than `capacity`.
    """
    groups: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, group), sorted
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lengths[row] > capacity:
            raise ValueError(
                f"row {row} has {lengths[row]} tokens, more than a packed sequence of {capacity}"
            )
        place = bisect.bisect_left(room, (lengths[row], -1))
        if place == len(room):
            groups.append([])
            free, group = capacity, len(groups) - 1
        else:
            free, group = room.pop(place)
        groups[group].append(row)
        bisect.insort(room, (free - lengths[row], group))
    return [sorted(group) for group in groups]


def pack_sums(values: np.ndarray, packs: Sequence[Sequence[int]]) -> np.ndarray:
    """The sum of a value per row, [rows], over each packed sequence, [sequences]."""
    return np.array([int(values[pack].sum()) for pack in map(list, packs)])


def pack_shares(
    lengths: Sequence[int], capacity: int, shares: Sequence[Share]
) -> tuple[list[list[int]], list[Share]]:
    """The groups of `pack` within each share, so that a group has one weight, and their shares."""
    groups: list[list[int]] = []
    packed, first = [], 0
    for share in shares:
        own = pack(lengths[first : first + share.rows], capacity)
        for group in own:
            groups.append([first + row for row in group])
        packed.append(Share(len(own), share.weight))
        first += share.rows
    return groups, packed
