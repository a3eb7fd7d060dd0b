"""The step whose last layers keep their activations, put together of the two in which all or none do. Pure.

A layer allocates the same, whatever becomes of the activations of others. But some blocks are freed elsewhere
than in the layer that allocates them, and when depends on who frees. Such a block is found in the other step
by its rank among those of its size that go the same way: from one pass through a layer to another, or out.
"""

from collections import Counter
from collections.abc import Mapping

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
    if not len(np.unique(freed)) == len(freed) == np.count_nonzero(dies):
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
    changes = (np.diff(line.phases) != 0) | (np.diff(line.layers) != 0)
    counts, found = Counter[tuple[int, int]](), dict[Place, np.ndarray]()
    for events in np.split(np.arange(len(line.events)), np.flatnonzero(changes) + 1):
        here = int(line.phases[events[0]]), int(line.layers[events[0]])
        found[*here, counts[here]] = events
        counts[here] += 1
    return found


def _ways(line: Timeline, visits: Mapping[Place, np.ndarray], numbers: Mapping[Place, int]) -> np.ndarray:
    """The number of the place where each block is allocated, and the layer that frees it, [2, blocks].

    Outside the layers both are negative, and say no more than the phase.
    """
    found = np.full((2, len(line.source)), NEVER)
    for place, events in visits.items():
        (phase, layer, _), here = place, line.events[events]
        outside = layer == WHOLE_MODEL
        found[0, here[here > 0] - 1] = -1 - phase if outside else numbers[place]
        found[1, -here[here < 0] - 1] = NEVER - 1 - phase if outside else layer
    return found


def _twins(ways: np.ndarray, is_kept: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """For each of these blocks that of the other step with the same rank on its way; NONE or UNCLEAR."""
    _, way, total = np.unique(ways, axis=1, return_inverse=True, return_counts=True)
    way = way.reshape(-1)  # some versions of numpy return another shape
    of_kept = np.bincount(way, weights=is_kept)
    alike, alone = 2 * of_kept == total, (of_kept == 0) | (of_kept == total)
    twins = np.where(alone[way], NONE, UNCLEAR)
    here, there = (np.flatnonzero(side & alike[way]) for side in (~is_kept, is_kept))
    here, there = (each[np.argsort(way[each], kind="stable")] for each in (here, there))  # the oldest first
    twins[here], twins[there] = blocks[there], blocks[here]
    return twins
