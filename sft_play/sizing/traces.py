"""The traces of one architecture: as few as needed to derive the step of every micro-batch size.

They are kept on disk by content, so nothing is traced twice, whatever machine a plan is for.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np

from sft_play.cache import cache_dir, entry
from sft_play.errors import UntraceableModel
from sft_play.machine.process import importing_libraries
from sft_play.sizing.architecture import AnyArchitecture, Architecture
from sft_play.sizing.memory import Counts, StepScaling
from sft_play.sizing.step import SHARES, StepSpec, step_code
from sft_play.sizing.timeline import Step, StepTrace
from sft_play.sizing.trace_files import load_trace, save_trace
from sft_play.sizing.work import TIMES, Work, WorkLine

ATTEMPTS = 3  # traces of a kind of step, two of which are likely to have the same structure
SMALLEST = 2  # rows; a single row takes shortcuts (nothing to expand or copy), so it is not on the line

_SHARED: dict[str, "Traces"] = {}


def shared_traces(config: AnyArchitecture) -> "Traces":
    """The traces of this architecture, shared by all of this process and kept in the project's cache."""
    folder, architecture = cache_dir(), Architecture.of(config)
    return _SHARED.setdefault(f"{folder} {architecture.text}", Traces(architecture, folder))


Size = tuple[int, float]  # of a micro-batch: its rows and supervised share


def kind_of(spec: StepSpec) -> str:
    """A key that is equal for steps whose block sizes are linear in their rows and supervised tokens."""
    alike = replace(spec, rows=0)
    if spec.eval_rows is None and spec.eval_row_tokens is None:
        # Otherwise the evaluation's supervised tokens depend on the share alone.
        alike = replace(alike, supervised_share=0.0)
    return repr((alike, spec.loss_tiles))


def size_of(spec: StepSpec) -> Size:
    """What tells a step from others of its kind."""
    return spec.rows, spec.supervised_share


def counts_of(spec: StepSpec, size: Size) -> Counts:
    """Rows and supervised tokens of a micro-batch of another size."""
    rows, share = size
    return rows, replace(spec, supervised_share=share).supervised(rows, spec.row_tokens)


def _another(spec: StepSpec) -> StepSpec:
    """A step of the same kind and share that is far enough away for the two to give the slopes of a line.

    In steps of SHARES rows, supervised tokens and halves of sequences are whole numbers, so slopes are exact.
    """
    distance = max(SHARES, spec.rows // 2 // SHARES * SHARES)
    while distance:
        for rows in (spec.rows + distance, spec.rows - distance):
            other = replace(spec, rows=rows)
            if rows >= SMALLEST and kind_of(other) == kind_of(spec):
                return other
        distance = distance // 2 // SHARES * SHARES
    return replace(spec, rows=spec.rows + max(SMALLEST, spec.rows // 2))


def _other_shares(spec: StepSpec, base: StepSpec) -> Iterator[StepSpec]:
    """Steps of the same kind and rows as `base` with other supervised shares, that of `spec` first."""
    smaller = (steps / SHARES for steps in range(1, SHARES))
    for share in (spec.supervised_share, *smaller):
        other = replace(base, supervised_share=share)
        differs = counts_of(base, size_of(other)) != counts_of(base, size_of(base))
        if differs and kind_of(other) == kind_of(base):
            yield other


def _in_proportion(work: Work, tokens: int) -> WorkLine:
    """The work of a single trace, scaled with the tokens."""
    per_token = np.zeros_like(work.sizes)
    per_token[:, TIMES] = work.sizes[:, TIMES] / tokens
    return WorkLine(work, tokens, per_token)


class Traces:
    """Traces steps on demand, until a few traces of a kind of step give all others of that kind."""

    def __init__(self, config: AnyArchitecture, cache: Path | None = None):
        """`cache`: folder of earlier traces; None keeps them in memory alone."""
        self.architecture, self._cache = Architecture.of(config), cache
        self.count = 0  # of steps that were traced, not read
        self._traces: dict[str, dict[Size, StepTrace]] = {}  # by kind
        # The sizes that others of a kind are derived from: those of one share, or of any share (None).
        self._bases: dict[tuple[str, float | None], tuple[Size, ...]] = {}
        self._all_layers = False  # whether fewer did not do, which takes a while to find out
        self._untraceable: UntraceableModel | None = None  # kept, since finding out may take a while

    def step(self, spec: StepSpec) -> Step:
        """The step of this micro-batch, traced or derived from other traces.

        Raises:
            UntraceableModel: the architecture cannot be traced.
        """
        if self._untraceable:
            raise self._untraceable
        alike = replace(spec, eval_rows=None)
        if spec.joined and spec.row_tokens == 1 and alike.loss_tiles == spec.loss_tiles:
            return self._scaled(alike, spec.eval_rows)
        return self._step(spec)

    def _scaled(self, spec: StepSpec, eval_rows: int | None) -> Step:
        """The step with another number of rows in its evaluation batch, if that is the only difference."""
        if eval_rows is None:
            return self._step(spec)
        self._step(spec)
        self._find_basis(spec)
        scaling = self._scaling(spec)
        if scaling is None:
            return self._traced(replace(spec, eval_rows=eval_rows)).step
        evaluated = counts_of(spec, (eval_rows, spec.supervised_share))
        return scaling.at(counts_of(spec, size_of(spec)), evaluated)

    def _step(self, spec: StepSpec) -> Step:
        if size_of(spec) not in self._known(spec) and spec.rows >= SMALLEST:
            self._find_basis(spec)
            scaling = self._scaling(spec)
            if scaling is not None:
                return scaling.at(counts_of(spec, size_of(spec)))
        return self._traced(spec).step

    def _scaling(self, spec: StepSpec) -> StepScaling | None:
        basis = self._basis(spec)
        if basis is None:
            return None
        traces = self._known(spec)
        counts = [counts_of(spec, size) for size in basis]
        return StepScaling.fit(counts, [traces[size] for size in basis])

    def _basis(self, spec: StepSpec) -> tuple[Size, ...] | None:
        """The traces that this step can be derived from: of any share, or of its own."""
        self._known(spec)
        kind = kind_of(spec)
        return self._bases.get((kind, None)) or self._bases.get((kind, spec.supervised_share))

    def _find_basis(self, spec: StepSpec) -> None:
        """Traces what other steps of a kind are derived from, if one step of this kind has been traced.

        These are a step with other rows and, if this one has another supervised share, one with such a share.
        """
        first = next((size for size in self._known(spec) if size[0] >= SMALLEST), None)
        if first is None or self._basis(spec) is not None:
            return
        base = replace(spec, rows=first[0], supervised_share=first[1])
        self._traced(_another(base))
        if spec.supervised_share != base.supervised_share:
            other = next(_other_shares(spec, base), None)
            if other is not None:
                self._traced(other)

    def _known(self, spec: StepSpec) -> dict[Size, StepTrace]:
        """The traces of this kind so far, at first those on disk."""
        kind = kind_of(spec)
        if kind not in self._traces:
            self._traces[kind] = {}
            for path in sorted(self._folder(spec).glob("[0-9]*")) if self._cache else ():
                rows, share = path.name.split("-")
                trace = load_trace(path)
                if trace is not None:
                    self._add(replace(spec, rows=int(rows), supervised_share=float(share)), trace)
        return self._traces[kind]

    def _folder(self, spec: StepSpec) -> Path:
        assert self._cache
        return entry("traces", self.architecture.text, kind_of(spec), step_code(), within=self._cache)

    def _traced(self, spec: StepSpec) -> StepTrace:
        traces = self._known(spec)
        if size_of(spec) not in traces:
            trace = self._new_trace(spec)
            self.count += 1
            self._add(spec, trace)
            if self._cache:
                save_trace(self._folder(spec) / f"{spec.rows}-{spec.supervised_share}", trace)
        return traces[size_of(spec)]

    def _new_trace(self, spec: StepSpec) -> StepTrace:
        with importing_libraries():  # torch among them, and most plans need no new trace
            from sft_play.sizing.trace import trace_step

        try:
            return trace_step(self.architecture.config, spec, all_layers=self._all_layers)
        except UntraceableModel as error:
            self._untraceable = error
            raise

    def _add(self, spec: StepSpec, trace: StepTrace) -> None:
        self._traces[kind_of(spec)][size_of(spec)] = trace
        self._all_layers = not trace.stand_ins
        self._find_bases(spec)

    def work(self, spec: StepSpec) -> WorkLine:
        """What a micro-batch of this kind and share computes and moves, as a function of its tokens.

        Raises:
            UntraceableModel: the architecture cannot be traced.
        """
        if spec.joined:
            spec = replace(spec, eval_rows=None)
        first = max(SMALLEST, spec.rows)
        self._find_basis(spec)
        second = _another(replace(spec, rows=first)).rows
        for rows in (first, second, *range(first + 1, first + ATTEMPTS)):
            if self._basis(spec) is None:
                self._traced(replace(spec, rows=rows))
        traces, basis = self._known(spec), self._basis(spec)
        if basis is not None:
            counts = [counts_of(spec, size) for size in basis]
            tokens = [(rows * spec.row_tokens, supervised) for rows, supervised in counts]
            share = counts_of(spec, size_of(spec))[1] / spec.tokens
            line = WorkLine.fit(tokens, [traces[size].work for size in basis], share)
            if line is not None:
                return line
        nearest = min(traces, key=lambda size: abs(size[0] - spec.rows))  # no two have the same structure
        return _in_proportion(traces[nearest].work, nearest[0] * spec.row_tokens)

    def _find_bases(self, spec: StepSpec) -> None:
        """Looks for traces that give others, now that there is another one: two of a share, or any three."""
        kind, newest = kind_of(spec), size_of(spec)
        traces = self._traces[kind]
        if spec.rows < SMALLEST or (kind, None) in self._bases:
            return
        others = [size for size in traces if size[0] >= SMALLEST and size != newest]
        others = [size for size in others if traces[size].same_structure(traces[newest])]
        counts = {size: counts_of(spec, size) for size in (newest, *others)}
        for pair in combinations(others, 2):
            if np.linalg.det([np.subtract(counts[size], counts[newest]) for size in pair]).round():
                self._bases[kind, None] = (newest, *pair)
                return
        for other in others:
            if other[1] == newest[1]:
                self._bases.setdefault((kind, newest[1]), (other, newest))
