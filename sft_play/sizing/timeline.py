"""One training step as a list of allocations and frees, and what follows from it: live bytes, their peak in each phase.

A step is recorded on a model with few layers (`StepTrace`). `expand` repeats the recorded layers until the model has all of
its own, so that an 80-layer model costs no more to trace than three layers. Nothing here knows torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

PHASES = ("load", "forward", "backward", "optimizer", "evaluation")
TERMS = ("weights", "adapters", "gradients", "optimizer", "activations", "loss", "temporaries")

WHOLE_MODEL = -1  # the layer of what belongs to no decoder layer


class LayersDiffer(Exception):
    """The recorded layers do not repeat, so they cannot stand for the others: record all layers instead."""


@dataclass(frozen=True)
class Segment:
    """A stretch of the recording that belongs to one phase, and to one decoder layer or to none."""

    phase: str
    layer: int  # among the recorded layers, or WHOLE_MODEL
    start: int
    stop: int


@dataclass(frozen=True)
class StepTrace:
    """A recorded step. Block b is allocated by event b + 1 and freed by event -(b + 1); some are never freed."""

    events: np.ndarray
    sizes: np.ndarray  # bytes of each block as asked for, before any allocator rounds them
    terms: np.ndarray  # index into TERMS
    owners: np.ndarray  # recorded layer that the block belongs to, or WHOLE_MODEL
    segments: tuple[Segment, ...]
    stand_ins: tuple[int, ...]  # for each layer of the model, the recorded layer that stands for it

    def same_structure(self, other: "StepTrace") -> bool:
        """Whether both recordings did the same things in the same order, with blocks of any size."""
        return (
            self.segments == other.segments
            and self.stand_ins == other.stand_ins
            and np.array_equal(self.events, other.events)
            and np.array_equal(self.terms, other.terms)
        )

    @cached_property
    def step(self) -> "Step":
        """The step of the model with all its layers."""
        return Step(expand(self), self.sizes)


@dataclass(frozen=True)
class Peak:
    """The most bytes that were alive at once, and what they were."""

    bytes: int
    terms: dict[str, int]


@dataclass(frozen=True)
class Timeline:
    """A step with all layers: like StepTrace, but block n has the size and term of the recorded block `source[n]`."""

    events: np.ndarray
    source: np.ndarray
    phases: np.ndarray  # of each event, index into PHASES
    in_layers: np.ndarray  # of each event, whether a decoder layer was at work
    terms: np.ndarray  # of each recorded block

    @cached_property
    def _source_of_event(self) -> np.ndarray:
        return self.source[np.abs(self.events) - 1]

    def changes(self, sizes: np.ndarray, granularity: int) -> np.ndarray:
        """Bytes that each event adds or takes away, blocks rounded up to a multiple of `granularity`."""
        rounded = -(-sizes // granularity) * granularity
        return np.sign(self.events) * rounded[self._source_of_event]

    def terms_at(self, event: int, changes: np.ndarray) -> dict[str, int]:
        """What is alive after the event, by term."""
        terms = self.terms[self._source_of_event[: event + 1]]
        return {name: int(changes[: event + 1][terms == index].sum()) for index, name in enumerate(TERMS)}


@dataclass(frozen=True)
class Step:
    """A timeline whose blocks have sizes: one step at one micro-batch."""

    timeline: Timeline
    sizes: np.ndarray

    def live_bytes(self, granularity: int = 1) -> np.ndarray:
        """Bytes alive after each event."""
        return np.cumsum(self.timeline.changes(self.sizes, granularity))

    def peaks(self, granularity: int = 1, *, in_layers: bool = False) -> dict[str, Peak]:
        """The peak of each phase that the step has; with `in_layers` only while a decoder layer is at work."""
        changes = self.timeline.changes(self.sizes, granularity)
        live = np.cumsum(changes)
        peaks = {}
        for index, phase in enumerate(PHASES):
            here = np.flatnonzero((self.timeline.phases == index) & (self.timeline.in_layers | (not in_layers)))
            if here.size:
                top = int(here[np.argmax(live[here])])
                peaks[phase] = Peak(int(live[top]), self.timeline.terms_at(top, changes))
        return peaks


@dataclass(frozen=True)
class Lives:
    """Where each recorded block is born and dies, as indices of segments (death -1: it stays)."""

    birth: np.ndarray
    death: np.ndarray


def _lives(trace: StepTrace) -> Lives:
    birth = np.full(len(trace.sizes), -1)
    death = np.full(len(trace.sizes), -1)
    for index, segment in enumerate(trace.segments):
        for event in trace.events[segment.start : segment.stop].tolist():
            (birth if event > 0 else death)[abs(event) - 1] = index
    return Lives(birth, death)


def _runs(segments: Sequence[Segment]) -> Iterator[list[int]]:
    """Groups segments: each stretch of layer after layer is one run, every other segment is a run of its own."""
    run: list[int] = []
    for index, segment in enumerate(segments):
        if run and (segment.layer == WHOLE_MODEL or segment.phase != segments[run[0]].phase):
            yield run
            run = []
        if segment.layer == WHOLE_MODEL:
            yield [index]
        else:
            run.append(index)
    if run:
        yield run


class _Expansion:
    """The state of `expand`: which copy of which block is alive, and the events so far."""

    def __init__(self, trace: StepTrace):
        self.trace = trace
        self.owners: list[int] = trace.owners.tolist()  # plain numbers: each is looked at for each layer of the model
        self.lives = _lives(trace)
        self.copies = [[j for j, s in enumerate(trace.stand_ins) if s == k] for k in range(max(trace.stand_ins) + 1)]
        self.crossing = self._crossing_blocks()
        self.alive: dict[tuple[int, int], int] = {}
        self.events: list[int] = []
        self.phases: list[int] = []
        self.in_layers: list[bool] = []
        self.source: list[int] = []

    def _crossing_blocks(self) -> dict[tuple[int, int, int, int], list[int]]:
        """Blocks that one layer leaves for its neighbour to free, in order of birth, by (phases, distance, owner)."""
        crossing: dict[tuple[int, int, int, int], list[int]] = {}
        for block in np.argsort(self.lives.birth, kind="stable").tolist():
            key = self._crossing_key(block)
            if key is not None:
                crossing.setdefault(key, []).append(block)
        return crossing

    def _crossing_key(self, block: int) -> tuple[int, int, int, int] | None:
        owner, death = self.owners[block], int(self.lives.death[block])
        if owner == WHOLE_MODEL or death < 0 or self.trace.segments[death].layer in (WHOLE_MODEL, owner):
            return None
        born, died = self.trace.segments[self.lives.birth[block]], self.trace.segments[death]
        return PHASES.index(born.phase), PHASES.index(died.phase), died.layer - owner, owner

    def emit(self, layer: int, event: int) -> None:
        block = abs(event) - 1
        key = (layer, block)
        if event > 0:
            self.source.append(block)
            self.alive[key] = number = len(self.source)
        elif key in self.alive:
            number = -self.alive.pop(key)
        else:
            raise LayersDiffer(f"block {block} of layer {layer} is freed twice")
        self.events.append(number)

    def whole_model_segment(self, segment: Segment) -> None:
        for event in self.trace.events[segment.start : segment.stop].tolist():
            owner = self.owners[abs(event) - 1]
            for layer in [WHOLE_MODEL] if owner == WHOLE_MODEL else self.copies[owner]:
                self.emit(layer, event)
        self._close(segment)

    def _close(self, segment: Segment) -> None:
        """Notes what the events since the last call belong to."""
        new = len(self.events) - len(self.phases)
        self.phases += [PHASES.index(segment.phase)] * new
        self.in_layers += [segment.layer != WHOLE_MODEL] * new

    def layer_segment(self, segment: Segment, layer: int) -> None:
        """Writes the recorded segment as that of `layer`, which `segment.layer` stands for."""
        for event in self.trace.events[segment.start : segment.stop].tolist():
            block = abs(event) - 1
            owner = self.owners[block]
            if event > 0 or owner == segment.layer:
                self.emit(layer, event)
            elif owner == WHOLE_MODEL:  # the first copy of the layer that frees it has done so
                if (WHOLE_MODEL, block) in self.alive:
                    self.emit(WHOLE_MODEL, event)
            else:
                self._free_neighbours_block(segment, layer, block)
        self._close(segment)

    def _free_neighbours_block(self, segment: Segment, layer: int, block: int) -> None:
        key = self._crossing_key(block)
        assert key is not None
        born, died, distance, owner = key
        neighbour = layer - distance
        if not 0 <= neighbour < len(self.trace.stand_ins) or abs(distance) != 1:
            raise LayersDiffer(f"layer {layer} frees a block of layer {neighbour}")
        theirs = self.crossing.get((born, died, distance, self.trace.stand_ins[neighbour]), [])
        rank = self.crossing[key].index(block)
        if len(theirs) != len(self.crossing[key]):
            raise LayersDiffer(f"layers {owner} and {self.trace.stand_ins[neighbour]} leave different blocks to the next")
        self.emit(neighbour, -(theirs[rank] + 1))


def expand(trace: StepTrace) -> Timeline:
    """Repeats the recorded layers as `trace.stand_ins` says.

    Raises:
        LayersDiffer: what the recorded layers leave for one another does not fit together when they are repeated.
    """
    expansion = _Expansion(trace)
    recorded = max(trace.stand_ins) + 1
    for run in _runs(trace.segments):
        first = trace.segments[run[0]]
        if first.layer == WHOLE_MODEL:
            expansion.whole_model_segment(first)
            continue
        of_layer = {trace.segments[index].layer: trace.segments[index] for index in run}
        order = [trace.segments[index].layer for index in run]
        if order not in (list(range(recorded)), list(range(recorded - 1, -1, -1))):
            raise LayersDiffer(f"layers ran in the order {order}")
        layers = range(len(trace.stand_ins))
        for layer in layers if order[0] == 0 else reversed(layers):
            expansion.layer_segment(of_layer[trace.stand_ins[layer]], layer)
    return Timeline(
        events=np.array(expansion.events, dtype=np.int64),
        source=np.array(expansion.source, dtype=np.int64),
        phases=np.array(expansion.phases, dtype=np.int8),
        in_layers=np.array(expansion.in_layers, dtype=bool),
        terms=trace.terms,
    )
