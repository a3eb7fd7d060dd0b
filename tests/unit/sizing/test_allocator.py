"""The model of PyTorch's caching allocator."""

import random

import numpy as np
import pytest

from sft_play.sizing.estimate.allocator import EMPTY_CACHE, accumulated_steps, replay, replay_steps
from sft_play.timeline import PHASES, TERMS, WHOLE_MODEL, Step, Timeline
from sft_play.units import MIB


def allocate(*sizes):
    return [(number, size) for number, size in enumerate(sizes, start=1)]


def test_small_requests_share_segments_of_two_mebibytes():
    result = replay(allocate(100, 100), expandable=False)
    assert result.allocated == 2 * 512
    assert result.reserved == 2 * MIB


@pytest.mark.parametrize(
    ("request_bytes", "segment"),
    [(MIB, 2 * MIB), (MIB + 1, 20 * MIB), (10 * MIB - 512, 20 * MIB), (11 * MIB, 12 * MIB)],
)
def test_a_segment_is_as_large_as_the_request_class_says(request_bytes, segment):
    assert replay(allocate(request_bytes), expandable=False).reserved == segment


def test_what_was_freed_serves_the_next_request():
    changes = [(1, 30 * MIB), (1, 0), (2, 30 * MIB), (2, 0), (3, 30 * MIB)]
    assert replay(changes, expandable=False).reserved == 30 * MIB


def test_a_block_too_large_by_less_than_a_mebibyte_is_given_whole():
    changes = [(1, 30 * MIB), (1, 0), (2, 29 * MIB + 512), (3, 400)]
    found = replay(changes, expandable=False)
    assert found.allocated == 30 * MIB + 512 and found.requested == 30 * MIB


def test_growing_requests_fragment_fixed_segments_but_not_expandable_ones():
    """Each round asks for a little more than the last one freed: the case that a longer batch makes."""
    changes = []
    for number in range(1, 11):
        changes += [(number, (20 + number) * MIB), (number, 0)]
    assert replay(changes, expandable=False).reserved == sum(range(22, 32, 2)) * MIB
    assert replay(changes, expandable=True).reserved == 40 * MIB


def test_of_equal_free_blocks_the_newest_segment_is_taken():
    """The driver puts a new segment below the others: the first stays whole for a larger request."""
    changes = [(1, 30 * MIB), (2, 20 * MIB), (2, 0), (3, 20 * MIB), (1, 0), (4, 10 * MIB), (4, 0)]
    assert replay([*changes, (5, 30 * MIB)], expandable=False).reserved == 50 * MIB
    pieces = [(1, 40 * MIB), (1, 0), (2, 20 * MIB), (3, 20 * MIB), (4, 20 * MIB), (2, 0), (3, 0)]
    split_newest = [(1, 20 * MIB), (2, 40 * MIB), (2, 0), (3, 20 * MIB), (1, 0), (4, 20 * MIB), (3, 0)]
    assert replay([*pieces, (5, 40 * MIB)], expandable=False).reserved == 60 * MIB
    assert replay([*split_newest, (5, 20 * MIB)], expandable=False).reserved == 60 * MIB


def test_an_emptied_cache_returns_whole_segments_only():
    changes = [(1, 40 * MIB), (2, 30 * MIB), (2, 0), (3, 15 * MIB), (1, 0), EMPTY_CACHE, (4, 30 * MIB)]
    assert replay(changes, expandable=False).reserved == 70 * MIB
    without = [change for change in changes if change != EMPTY_CACHE]
    later = [*changes, (5, 40 * MIB)]
    assert replay(without, expandable=False).reserved == 70 * MIB
    assert replay(later, expandable=False).reserved == 100 * MIB


def test_a_full_device_gets_back_segments_that_are_entirely_free_before_another_is_made():
    changes = [(1, 40 * MIB), (2, 30 * MIB), (1, 0), (3, 15 * MIB), (4, 20 * MIB), (3, 0), (2, 0)]
    largest = [*changes, (5, 50 * MIB)]  # the 25 beside block 4 and the 30 are free, and too small
    assert replay(largest, expandable=False).reserved == 120 * MIB
    assert replay(largest, expandable=False, capacity=119 * MIB).reserved == 90 * MIB
    assert replay(largest, expandable=False, capacity=120 * MIB).reserved == 120 * MIB
    assert replay(largest, expandable=False, capacity=60 * MIB).reserved == 90 * MIB  # more than there is


def test_free_neighbours_merge():
    changes = [(1, 10 * MIB), (2, 10 * MIB), (3, 10 * MIB), (1, 0), (2, 0), (4, 20 * MIB)]
    assert replay(changes, expandable=True).reserved == 40 * MIB  # 30 in pages of 20, the first 20 reused


@pytest.mark.parametrize("expandable", [True, False])
def test_reserved_is_never_below_allocated_and_bookkeeping_survives_any_order(expandable):
    rng = random.Random(0)
    alive, changes, live, most = {}, [], 0, 0
    for number in range(1, 3000):
        if alive and rng.random() < 0.5:
            gone = rng.choice(list(alive))
            live -= alive.pop(gone)
            changes.append((gone, 0))
        else:
            size = rng.choice([300, 70_000, 3 * MIB, 15 * MIB]) + rng.randrange(1000)
            alive[number] = -(-size // 512) * 512
            live += alive[number]
            most = max(most, live)
            changes.append((number, size))
    result = replay(changes, expandable=expandable)
    assert most <= result.allocated <= result.reserved
    assert result.allocated < 1.1 * most


def test_what_was_freed_on_one_stream_is_not_given_to_another():
    changes = [(1, 30 * MIB), (1, 0), (2, 30 * MIB), (2, 0), (3, 30 * MIB)]
    assert replay(changes, expandable=False).reserved == 30 * MIB
    assert replay(changes, expandable=False, streams={2: 1}).reserved == 60 * MIB


def micro_batch(*, gradient_is_there: bool) -> Step:
    """A weight, an activation, and a gradient that is born in the backward pass, unless it is there before."""
    weight, activation, gradient, added = 1, 2, 3, 4
    born = [added, -added, -activation] if gradient_is_there else [gradient, -activation]
    parts = {
        "load": [weight, gradient] if gradient_is_there else [weight],
        "forward": [activation],
        "backward": born,
        "optimizer": [] if gradient_is_there else [-gradient],
    }
    events = [event for part in parts.values() for event in part]
    phases = [PHASES.index(phase) for phase, part in parts.items() for _ in part]
    terms = [TERMS.index(term) for term in ("weights", "activations", "gradients", "temporaries")]
    timeline = Timeline(
        events=np.array(events),
        source=np.arange(4),
        phases=np.array(phases),
        layers=np.full(len(events), WHOLE_MODEL),
        terms=np.array(terms),
        streams=np.zeros(4, dtype=np.int64),
    )
    return Step(timeline, np.array([40 * MIB, 30 * MIB, 40 * MIB, 40 * MIB]))


def test_gradients_are_born_in_the_first_micro_batch_and_found_by_the_next_one():
    first, later = (micro_batch(gradient_is_there=there) for there in (False, True))
    sizes, parts = accumulated_steps(first, later)
    named = {1: "weight", 2: "activation", 3: "gradient"}
    of_later = {max(named) + 4 + number: name for number, name in {2: "later activation", 4: "added"}.items()}
    lines = [[(named | of_later).get(abs(event)) for event in part if sizes[abs(event)]] for part in parts]
    step = [
        ["activation"],
        ["gradient", "activation"],
        ["later activation"],
        ["added", "added", "later activation"],
        ["gradient"],
    ]
    assert lines == [["weight"], *step, *step, []], lines
    both = replay_steps(later), replay_steps(later, first=first)
    assert [found.requested for found in both] == [150 * MIB] * 2
