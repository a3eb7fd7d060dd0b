"""The step whose last layers keep their activations, put together of the two in which all or none do. Pure.

A layer allocates the same, whatever becomes of the activations of others. But some blocks are freed elsewhere
than in the layer that allocates them, and when depends on who frees. Such a block is found in the other step
by its rank among those of its size that go the same way: from one pass through a layer to another, or out.
"""

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from sft_play.timeline import WHOLE_MODEL, LayersDiffer, Step, Timeline

Place = tuple[int, int, int]  # a phase, a layer, and how often the phase was there before
NEVER = -1  # is a block freed
NONE, UNCLEAR = -1, -2  # goes the same way in the other step; are not as many there


def mixed_step(recomputed: Step, kept: Step, apart: int) -> Step:
    """The step that keeps the activations of so many of the last layers.

    Outside the layers it is the one that recomputes all of them.

    Raises:
        LayersDiffer: layers are not told apart, or hand on other blocks if their activations are kept.
    """
    ours, theirs = recomputed.timeline, kept.timeline
    first = int(ours.layers.max()) + 1 - apart
    visits, others = _visits(ours), _visits(theirs)
    in_kept = {place for place in others if place[1] >= first}
    if first < 1 or in_kept != {place for place in visits if place[1] >= first}:
        raise LayersDiffer("they are not told apart, or run in another order if their activations are kept")
    numbers = {place: number for number, place in enumerate(visits | others)}
    # from here on, the blocks and events of both, one after the other
    born, death = np.concatenate([_ways(ours, visits, numbers), _ways(theirs, others, numbers)], axis=1)
    is_kept = np.arange(len(born)) >= len(ours.source)
    own = np.isin(born, [numbers[place] for place in in_kept]) == is_kept  # whether the new step has it
    sizes = np.concatenate([step.sizes[step.timeline.source] for step in (recomputed, kept)])
    layer_of = np.array([layer for _, layer, _ in numbers])
    leave = np.flatnonzero((death != NEVER) & ((born < 0) | (death != layer_of[born])))
    twins = np.full(len(born), NONE)
    twins[leave] = _twins(np.stack([born, death, sizes])[:, leave], is_kept[leave], leave)

    events = np.concatenate([ours.events, theirs.events])
    named = np.abs(events) - 1
    named[len(ours.events) :] += len(ours.source)
    # what no layer allocates, but others free than if all recompute, lives as long as if they did
    lost = (events < 0) & ((born < 0) & (death > NEVER) & (twins == NONE))[named]
    order = list[np.ndarray]()
    for place, here in visits.items():
        order += [others[place] + len(ours.events), here[lost[here]]] if place in in_kept else [here]
    taken = np.concatenate(order)
    blocks = np.where(own, np.arange(len(own)), twins)[named[taken]]
    handed_on = (born >= 0) & (death > NEVER)
    if (blocks == UNCLEAR).any() or handed_on[named[taken[blocks == NONE]]].any():
        raise LayersDiffer("they hand on other blocks if their activations are kept")
    taken, blocks = taken[blocks != NONE], blocks[blocks != NONE]  # the others are kept, or not there
    return _step((recomputed, kept), taken, events[taken] > 0, named[taken], blocks, own & (death != NEVER))


def _step(
    steps: tuple[Step, Step],
    taken: np.ndarray,
    allocates: np.ndarray,
    named: np.ndarray,
    blocks: np.ndarray,
    dies: np.ndarray,
) -> Step:
    """The step of the events that are `taken` of both.

    Each names a block of the step that it is of, which may stand for one of the other: `blocks` has that one.
    """
    ours, theirs = (step.timeline for step in steps)
    allocated, freed = blocks[allocates], blocks[~allocates]
    if (np.bincount(freed, minlength=len(dies)) != dies).any():
        raise LayersDiffer("a block is freed twice or never")
    number, as_freed = np.zeros(len(dies), dtype=np.int64), np.arange(len(dies))
    number[allocated] = np.arange(1, len(allocated) + 1)
    as_freed[freed] = named[~allocates]  # when it is freed decides whether it is called an activation
    source = np.concatenate([ours.source, theirs.source + len(ours.terms)])
    line = Timeline(
        events=np.where(allocates, 1, -1) * number[blocks],
        source=source[as_freed[allocated]],
        phases=np.concatenate([ours.phases, theirs.phases])[taken],
        layers=np.concatenate([ours.layers, theirs.layers])[taken],
        terms=np.concatenate([ours.terms, theirs.terms]),
        streams=np.concatenate([ours.streams, theirs.streams]),
        in_ram=(*ours.in_ram, *(block + len(ours.terms) for block in theirs.in_ram)),
    )
    return Step(line, np.concatenate([step.sizes for step in steps]))


def _visits(line: Timeline) -> dict[Place, np.ndarray]:
    """The numbers of the events of each visit to a layer, and of those between them, in their order."""
    changes = np.flatnonzero((np.diff(line.phases) != 0) | (np.diff(line.layers) != 0)) + 1
    counts, found = Counter[tuple[int, int]](), dict[Place, np.ndarray]()
    events = np.arange(len(line.events))
    for first, stop in pairwise([0, *changes.tolist(), len(events)]):
        here = int(line.phases[first]), int(line.layers[first])
        found[*here, counts[here]] = events[first:stop]
        counts[here] += 1
    return found


def _ways(line: Timeline, visits: Mapping[Place, np.ndarray], numbers: Mapping[Place, int]) -> np.ndarray:
    """The number of the place where each block is allocated, and the layer that frees it, [2, blocks].

    Outside the layers both are negative, and say no more than the phase.
    """
    of_visit = [
        (numbers[place], place[1]) if place[1] != WHOLE_MODEL else (-1 - place[0], NEVER - 1 - place[0])
        for place in visits
    ]
    born, freed = np.repeat(np.array(of_visit).T, [*map(len, visits.values())], axis=1)
    allocates, found = line.events > 0, np.full((2, len(line.source)), NEVER)
    found[0, line.events[allocates] - 1] = born[allocates]
    found[1, -line.events[~allocates] - 1] = freed[~allocates]
    return found


def _twins(ways: np.ndarray, is_kept: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """For each of these blocks that of the other step with the same rank on its way; NONE or UNCLEAR."""
    one = np.zeros(ways.shape[1], dtype=np.int64)  # number for each way: rows are slow to compare
    for row in ways:
        values, place = np.unique(row, return_inverse=True)
        one = one * len(values) + place
    _, way, total = np.unique(one, return_inverse=True, return_counts=True)
    of_kept = np.bincount(way, weights=is_kept)
    alike, alone = 2 * of_kept == total, (of_kept == 0) | (of_kept == total)
    twins = np.where(alone[way], NONE, UNCLEAR)
    here, there = (np.flatnonzero(side & alike[way]) for side in (~is_kept, is_kept))
    here, there = (each[np.argsort(way[each], kind="stable")] for each in (here, there))  # the oldest first
    twins[here], twins[there] = blocks[there], blocks[here]
    return twins
