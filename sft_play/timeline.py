"""One training step as a list of allocations and frees, and the memory peak of each of its phases.

A step is traced on a model with few layers (`StepTrace`). `expand` repeats the traced layers until the model
has its full depth, so that tracing an 80-layer model costs no more than tracing three layers. No torch here.

Shapes: E events, B traced blocks (a block is one allocation), N blocks of the expanded step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, compress, pairwise
from typing import Any, Literal
from weakref import WeakValueDictionary

import numpy as np

from sft_play.work import Work

PHASES = ("load", "forward", "backward", "optimizer", "evaluation")
TERMS = ("weights", "adapters", "gradients", "optimizer", "activations", "loss", "temporaries", "engine")
Place = Literal["begin", "layers", "gradients", "end"]
WHOLE_MODEL = -1  # stands in for a layer index where a block or segment belongs to no decoder layer


class LayersDiffer(Exception):
    """The traced layers do not repeat, so they cannot represent the others: trace all layers instead."""


@dataclass(frozen=True)
class Segment:
    """Consecutive events of a trace that belong to one phase and to one decoder layer, or to none."""

    phase: str
    layer: int  # index among the traced layers, or WHOLE_MODEL
    start: int
    stop: int


@dataclass(frozen=True)
class StepTrace:
    """A traced step. Event b + 1 allocates block b, event -(b + 1) frees it; some blocks are never freed."""

    events: np.ndarray  # [E]
    sizes: np.ndarray  # [B] requested bytes of each block, before any allocator rounds them up
    terms: np.ndarray  # [B] index into TERMS
    owners: np.ndarray  # [B] traced layer that the block belongs to, or WHOLE_MODEL
    streams: np.ndarray  # [B] of the GPU on which the block is allocated; 0: that of computation
    segments: tuple[Segment, ...]
    stand_ins: tuple[int, ...]  # for each layer, the traced layer that represents it; () if all are traced
    work: Work  # what the step computes
    in_ram: tuple[int, ...] = ()  # blocks that are in RAM, of a step that offloads what a GPU would hold

    def same_structure(self, other: "StepTrace") -> bool:
        """Whether both traces have the same events in the same order, whatever the sizes of their blocks."""
        return (
            self.segments == other.segments
            and self.in_ram == other.in_ram
            and self.stand_ins == other.stand_ins
            and np.array_equal(self.events, other.events)
            and np.array_equal(self.terms, other.terms)
            and self.work.same_operations(other.work)
        )

    @property
    def traced_layers(self) -> int:
        """How many layers the trace tells apart."""
        return max(self.stand_ins, default=-1) + 1

    def born_in(self, phase: str) -> np.ndarray:
        """Whether each block is allocated in this phase, [blocks]."""
        births = np.zeros(len(self.sizes), dtype=bool)
        for segment in self.segments:
            events = self.events[segment.start : segment.stop]
            births[events[events > 0] - 1] = segment.phase == phase
        return births

    @cached_property
    def step(self) -> "Step":
        """The step of the full-depth model; traces with the same events share all but the sizes."""
        arrays = (array.tobytes() for array in (self.events, self.terms, self.owners, self.streams))
        key = (*arrays, self.segments, self.stand_ins, self.in_ram)
        timeline = _TIMELINES.get(key) or expand(self)
        _TIMELINES[key] = timeline
        return Step(timeline, self.sizes)


@dataclass(frozen=True)
class Peak:
    """The most bytes that were live at once, and their breakdown by term."""

    bytes: int
    terms: dict[str, int]


@dataclass(frozen=True)
class Timeline:
    """A full-depth step: like `StepTrace`, but block n is a copy of the traced block `source[n]`."""

    events: np.ndarray  # [E]
    source: np.ndarray  # [N] traced block whose size and term this block has
    phases: np.ndarray  # [E] index into PHASES
    layers: np.ndarray  # [E] the decoder layer that was running, or WHOLE_MODEL
    terms: np.ndarray  # [B] of each traced block
    streams: np.ndarray  # [B]
    in_ram: tuple[int, ...] = ()  # traced blocks that are in RAM

    @cached_property
    def _source_of_event(self) -> np.ndarray:
        """The traced block of each event, [E]."""
        return self.source[np.abs(self.events) - 1]

    @cached_property
    def longer(self) -> dict[tuple["Buffer", ...], tuple["Timeline", list[bool]]]:
        """This timeline with more blocks, of any size, and which of them it has a place for."""
        return {}

    def changes(self, sizes: np.ndarray) -> np.ndarray:
        """Bytes that each event allocates or, negative, frees, [E], for traced blocks of `sizes`, [B]."""
        return np.sign(self.events) * sizes[self._source_of_event]

    def with_block(self, buffer: "Buffer") -> "Timeline | None":
        """This timeline with a block from a place in a phase, if it has that, to the end of another one."""
        events, after = np.flatnonzero(self.phases == PHASES.index(buffer.first)), buffer.place == "end"
        marked = self.terms[self.source[np.abs(self.events[events]) - 1]] == TERMS.index("engine")
        inner = self.layers[events] != WHOLE_MODEL
        found = {"layers": (inner,), "gradients": (marked, inner)}.get(buffer.place, ())
        begins = np.concatenate([*(events[each] for each in found), events])[-1 if after else 0 :][:1]
        if not begins.size:
            return None
        ends = np.flatnonzero(self.phases == PHASES.index(buffer.last))[-1:] if buffer.last else begins[:0]
        places = np.concatenate([begins + after, ends + 1])
        return replace(
            self,
            events=np.insert(self.events, places, np.array([1, -1])[: len(places)] * (len(self.source) + 1)),
            source=np.insert(self.source, len(self.source), len(self.terms)),
            phases=np.insert(self.phases, places, self.phases[np.concatenate([begins, ends])]),
            layers=np.insert(self.layers, places, WHOLE_MODEL),
            terms=np.append(self.terms, TERMS.index(buffer.term)),
            in_ram=(*self.in_ram, len(self.terms)) if buffer.in_ram else self.in_ram,
            streams=np.append(self.streams, 0),
        )

    def with_blocks(self, buffers: Sequence["Buffer"]) -> tuple["Timeline", list[bool]]:
        """As `with_block`, with each of them that it has a place for, and which these are."""
        lines = [*accumulate(buffers, lambda line, each: line.with_block(each) or line, initial=self)]
        return lines[-1], [line is not before for before, line in pairwise(lines)]

    def terms_at(self, event: int, changes: np.ndarray) -> dict[str, int]:
        """Live bytes after the event, by term; `changes` is [E], as returned by the method of that name."""
        terms = self.terms[self._source_of_event[: event + 1]]
        return {name: int(changes[: event + 1][terms == index].sum()) for index, name in enumerate(TERMS)}


_TIMELINES: WeakValueDictionary[tuple[Any, ...], Timeline] = WeakValueDictionary()  # while a trace has one


@dataclass(frozen=True)
class Buffer:
    """A block that does not depend on the operations of a step."""

    term: str
    bytes: int
    first: str  # phase in which it is allocated
    last: str | None  # phase at whose end it is freed; None: never
    place: Place = "begin"  # of the first phase: its first event, of a layer, of a gradient, or after all
    in_ram: bool = False  # of a process on a GPU


@dataclass(frozen=True)
class Step:
    """A timeline whose blocks have sizes: one step at one micro-batch size."""

    timeline: Timeline
    sizes: np.ndarray  # [B] bytes of the traced blocks

    def rounded(self, granularity: int) -> "Step":
        """The step with its blocks rounded up to multiples of `granularity` bytes."""
        return replace(self, sizes=-(-self.sizes // granularity) * granularity)

    def on_device(self) -> "Step":
        """The step with nothing in RAM."""
        return self._with_sizes(False) if self.timeline.in_ram else self

    def in_ram(self) -> "Step":
        """The step with nothing on the device."""
        return self._with_sizes(True)

    def _with_sizes(self, in_ram: bool) -> "Step":
        kept = np.isin(np.arange(len(self.sizes)), self.timeline.in_ram) == in_ram
        return replace(self, sizes=np.where(kept, self.sizes, 0))

    def without(self, *terms: str, in_ram: bool = False) -> "Step":
        """The step without the blocks of these terms; with `in_ram`, without those of them that are there."""
        line = self.timeline
        gone = np.isin(line.terms[line.source], [TERMS.index(term) for term in terms])
        gone &= np.isin(line.source, line.in_ram) | (not in_ram)
        number = np.cumsum(~gone)  # [N] of each block that stays, from 1
        kept = ~gone[np.abs(line.events) - 1]
        changed = replace(
            line,
            events=np.sign(line.events[kept]) * number[np.abs(line.events[kept]) - 1],
            source=line.source[~gone],
            phases=line.phases[kept],
            layers=line.layers[kept],
        )
        return replace(self, timeline=changed)

    def bytes_of(self, term: str) -> int:
        """Bytes of all blocks of a term, whenever they live."""
        return int(self.sizes_of(term).sum())

    def sizes_of(self, term: str) -> np.ndarray:
        """Bytes of each block of a term, [blocks]."""
        line = self.timeline
        return self.sizes[line.source][line.terms[line.source] == TERMS.index(term)]

    def with_buffers(self, *buffers: Buffer) -> "Step":
        """The step with these blocks; those of phases that it does not have are left out."""
        found, line = [each for each in buffers if each.bytes], self.timeline
        if (key := tuple(replace(each, bytes=0) for each in found)) not in line.longer:
            line.longer[key] = line.with_blocks(key)
        line, has = line.longer[key]
        more = [each.bytes for each in compress(found, has)]
        return replace(self, timeline=line, sizes=np.append(self.sizes, more)) if more else self

    def peaks(self, *, in_layers: bool = False) -> dict[str, Peak]:
        """The peak of each phase that the step has; with `in_layers`, only while a decoder layer runs."""
        line, changes = self.timeline, self.timeline.changes(self.sizes)
        live, counted = np.cumsum(changes), (line.layers != WHOLE_MODEL) | (not in_layers)
        peaks = {}
        for index, phase in enumerate(PHASES):
            here = np.flatnonzero((line.phases == index) & counted)
            if here.size:
                top = int(here[np.argmax(live[here])])
                peaks[phase] = Peak(int(live[top]), line.terms_at(top, changes))
        return peaks


def _lifetimes(trace: StepTrace) -> np.ndarray:
    """The segments in which each traced block is allocated and freed, [2, B]; -1 if it is never freed."""
    found = np.full((2, len(trace.sizes)), -1)
    for index, segment in enumerate(trace.segments):
        for event in trace.events[segment.start : segment.stop].tolist():
            found[int(event < 0), abs(event) - 1] = index
    return found


def sweeps(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """Groups segments: one pass through the layers is a group, any other segment is a group of its own."""
    sweep: list[Segment] = []
    for segment in segments:
        if sweep and (WHOLE_MODEL in (segment.layer, sweep[0].layer) or segment.phase != sweep[0].phase):
            yield sweep
            sweep = []
        sweep.append(segment)
    if sweep:
        yield sweep


class _Expansion:
    """The state of `expand`: which copy of which block is alive, and the events so far."""

    def __init__(self, trace: StepTrace):
        self.trace = trace
        self.owners: list[int] = trace.owners.tolist()  # a list is faster than an array to index one by one
        self.births, self.deaths = _lifetimes(trace)
        self.copies: list[list[int]] = [[] for _ in range(trace.traced_layers)]
        for layer, stand_in in enumerate(trace.stand_ins):
            self.copies[stand_in].append(layer)
        several = [layer for own in self.copies if len(own) > 1 for layer in own]
        # layers that stand for others must not be passed over; at each end are so many that do not
        self.reach = min(min(several), len(trace.stand_ins) - 1 - max(several)) if several else 1
        self.crossing = self._crossing_blocks()
        self.alive: dict[tuple[int, int], int] = {}  # (layer, traced block) -> block number of the copy
        self.events, self.source = list[int](), list[int]()
        self.phases, self.layers = list[int](), list[int]()

    def _crossing_blocks(self) -> dict[tuple[int, int, int, int], list[int]]:
        """Blocks that one layer allocates and another one frees, by key, in order of allocation."""
        crossing: dict[tuple[int, int, int, int], list[int]] = {}
        for block in np.argsort(self.births, kind="stable").tolist():
            if (key := self._crossing_key(block)) is not None:
                crossing.setdefault(key, []).append(block)
        return crossing

    def _crossing_key(self, block: int) -> tuple[int, int, int, int] | None:
        """Phases that allocate and free it, distance in layers, owner; None if it stays in its layer."""
        owner, death = self.owners[block], int(self.deaths[block])
        if owner == WHOLE_MODEL or death < 0 or self.trace.segments[death].layer in (WHOLE_MODEL, owner):
            return None
        born, died = self.trace.segments[self.births[block]], self.trace.segments[death]
        return PHASES.index(born.phase), PHASES.index(died.phase), died.layer - owner, owner

    def emit(self, layer: int, event: int) -> None:
        """Appends the traced event as an event of `layer`, with the number that this layer's copy has."""
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
        """Copies a segment outside the layers; what it does to a layer's block, it does to every copy."""
        for event in self.trace.events[segment.start : segment.stop].tolist():
            owner = self.owners[abs(event) - 1]
            for layer in [WHOLE_MODEL] if owner == WHOLE_MODEL else self.copies[owner]:
                self.emit(layer, event)
        self._close(segment)

    def _close(self, segment: Segment, layer: int = WHOLE_MODEL) -> None:
        """Labels the events since the last call with the segment's phase and the layer that it stands for."""
        new = len(self.events) - len(self.phases)
        self.phases += [PHASES.index(segment.phase)] * new
        self.layers += [layer] * new

    def layer_segment(self, segment: Segment, layer: int) -> None:
        """Copies the traced segment of `segment.layer` as that of `layer`, which it represents."""
        for event in self.trace.events[segment.start : segment.stop].tolist():
            block = abs(event) - 1
            owner = self.owners[block]
            if event > 0 or owner == segment.layer:
                self.emit(layer, event)
            elif owner == WHOLE_MODEL:
                if (WHOLE_MODEL, block) in self.alive:  # only the first copy of the layer can free it
                    self.emit(WHOLE_MODEL, event)
            else:
                self._free_block_of_neighbor(layer, block)
        self._close(segment, layer)

    def _free_block_of_neighbor(self, layer: int, block: int) -> None:
        """Frees the block of the layer's real neighbor that corresponds to `block`."""
        key = self._crossing_key(block)
        assert key is not None
        born, died, distance, _ = key
        neighbor, stand_ins = layer - distance, self.trace.stand_ins
        known = 0 <= neighbor < len(stand_ins) and abs(distance) <= self.reach
        theirs = self.crossing.get((born, died, distance, stand_ins[neighbor]), []) if known else []
        if len(theirs) != len(self.crossing[key]):
            raise LayersDiffer(f"layers {neighbor} and {layer} do not share what traced ones do")
        rank = self.crossing[key].index(block)
        self.emit(neighbor, -(theirs[rank] + 1))


def expand(trace: StepTrace) -> Timeline:
    """Repeats the traced layers as `trace.stand_ins` says.

    A model of five equal layers is traced with three, the first, a middle and the last one: `stand_ins` is
    (0, 1, 1, 1, 2). In the forward pass, a layer saves a block (`s`) for its backward pass, allocates its
    output (`o`) and frees its input. Block numbers in the trace and, after expansion, in the timeline:

        traced layer     0            1            2
        traced events    +1 +2        +3 +4 -2     +5 +6 -4
                         s0 o0        s1 o1 -o0    s2 o2 -o1

        layer            0       1            2            3             4
        stands for it    0       1            1            1             2
        events           +1 +2   +3 +4 -2     +5 +6 -4     +7 +8 -6      +9 +10 -8
        source           s0 o0   s1 o1 -o0    s1 o1 -o1    s1 o1 -o1     s2 o2 -o1

    Each copy of layer 1 gets blocks of its own (3 to 8), which have the sizes of s1 and o1. In the trace,
    layer 1 frees o0, but layer 2 of the model must free the output of its own neighbor. So a block that goes
    from one layer to the next is looked up by what it is - the n-th block that a layer allocates in this
    phase for the next to free - in the traced layer that represents the neighbor. If traced layers leave
    their neighbors different numbers of such blocks, they cannot represent one another, and all are traced.

    The backward pass is expanded alike, with the layers in reverse order, and events outside the layers that
    touch a layer's block (an optimizer update, say) are repeated once for each copy.

    Raises:
        LayersDiffer: the blocks that traced layers pass to each other do not match when layers are repeated.
    """
    expansion = _Expansion(trace)
    upwards = list(range(trace.traced_layers))
    for sweep in sweeps(trace.segments):
        if sweep[0].layer == WHOLE_MODEL:
            expansion.whole_model_segment(sweep[0])
            continue
        segment_of = {segment.layer: segment for segment in sweep}
        order = [segment.layer for segment in sweep]
        if order not in (upwards, upwards[::-1]):
            raise LayersDiffer(f"layers ran in the order {order}")
        for layer in range(len(trace.stand_ins))[:: 1 if order == upwards else -1]:
            expansion.layer_segment(segment_of[trace.stand_ins[layer]], layer)
    if any(expansion.deaths[block] >= 0 for _, block in expansion.alive):
        raise LayersDiffer("a block is not freed by the layer that frees it in the trace")
    return Timeline(
        events=np.array(expansion.events, dtype=np.int32),  # small: a plan keeps those of all steps
        source=np.array(expansion.source, dtype=np.int32),
        phases=np.array(expansion.phases, dtype=np.int8),
        layers=np.array(expansion.layers, dtype=np.int16),
        terms=trace.terms,
        in_ram=trace.in_ram,
        streams=trace.streams,
    )
