"""Handmade traces: like real layers, these save blocks for the backward pass and pass blocks on."""

import numpy as np

from sft_play.timeline import TERMS, WHOLE_MODEL, Segment, StepTrace
from sft_play.work import Work

NO_WORK = Work(
    kinds=np.zeros(0, np.int8),
    dtypes=np.zeros(0, np.int8),
    by_python=np.zeros(0, bool),
    by_engine=np.zeros(0, np.int8),
    sizes=np.zeros((0, 6)),
    order=np.zeros(0, int),
    layers=np.zeros(0, np.int16),
    backward_from=0,
    trained_elements=0,
    trained_tensors=0,
)
ACTIVATIONS, WEIGHTS = TERMS.index("activations"), TERMS.index("weights")


class TraceBuilder:
    """Builds a trace event by event."""

    def __init__(self):
        self.events, self.sizes, self.terms, self.owners, self.segments = [], [], [], [], []

    def segment(self, phase, layer=WHOLE_MODEL):
        if self.segments:
            self.segments[-1] = (*self.segments[-1][:3], len(self.events))
        self.segments.append((phase, layer, len(self.events), len(self.events)))

    def allocate(self, size, term=ACTIVATIONS):
        self.sizes.append(size)
        self.terms.append(term)
        self.owners.append(self.segments[-1][1])
        self.events.append(len(self.sizes))
        return len(self.sizes)

    def free(self, block):
        self.events.append(-block)

    def trace(self, stand_ins):
        self.segment("optimizer")
        return StepTrace(
            events=np.array(self.events),
            sizes=np.array(self.sizes),
            terms=np.array(self.terms),
            owners=np.array(self.owners),
            streams=np.zeros(len(self.sizes), dtype=np.int8),
            segments=tuple(Segment(*segment) for segment in self.segments),
            stand_ins=stand_ins,
            work=NO_WORK,
        )


def step_of(layers, stand_ins, *, saved=10, leaves=2):
    """Layers of weight 100 that save `saved` for the backward pass and pass `leaves` to the next one."""
    r = TraceBuilder()
    r.segment("load")
    r.allocate(1000, WEIGHTS)
    for layer in range(layers):
        r.segment("load", layer)
        r.allocate(100, WEIGHTS)
    r.segment("forward")
    stream = r.allocate(leaves)
    kept = []
    for layer in range(layers):
        r.segment("forward", layer)
        kept.append(r.allocate(saved))
        passed = r.allocate(leaves)
        r.free(stream)
        stream = passed
    r.segment("forward")
    loss = r.allocate(7)
    r.segment("backward")
    gradient = r.allocate(leaves)
    r.free(loss)
    r.free(stream)
    for layer in reversed(range(layers)):
        r.segment("backward", layer)
        passed = r.allocate(leaves)
        r.free(gradient)
        r.free(kept[layer])
        gradient = passed
    r.segment("backward")
    r.free(gradient)
    return r.trace(stand_ins)
