"""Recorded steps of one architecture: as few as it takes to know the step of every micro-batch."""

from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

from sft_play.sizing.memory import Growth
from sft_play.sizing.step import StepSpec
from sft_play.sizing.timeline import Step, StepTrace
from sft_play.sizing.trace import UntraceableModel, trace_step

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SMALLEST = 2  # a batch of one row takes turns of its own (nothing to expand or copy), so no line goes through it

_SHARED: dict[str, "Recordings"] = {}


def shared_recordings(config: "PretrainedConfig") -> "Recordings":
    """The recordings of this architecture in this process, so that two questions about it cost one trace."""
    return _SHARED.setdefault(config.to_json_string(use_diff=False), Recordings(config))


class Recordings:
    """Records a step when it is asked for, until two recordings of its kind give all others."""

    def __init__(self, config: "PretrainedConfig"):
        self.config = config
        self._traces: dict[str, dict[int, StepTrace]] = {}  # by everything but the rows
        self._growth: dict[str, Growth] = {}
        self._untraceable: UntraceableModel | None = None  # asked once: finding out may take a while

    def step(self, spec: StepSpec) -> Step:
        """The step of this micro-batch, recorded or derived.

        Raises:
            UntraceableModel: the architecture cannot be traced.
        """
        if self._untraceable:
            raise self._untraceable
        kind = repr((replace(spec, rows=0), spec.kinks))
        traces = self._traces.setdefault(kind, {})
        if spec.rows not in traces and spec.rows >= SMALLEST and kind in self._growth:
            return self._growth[kind].at(spec.rows)
        if spec.rows not in traces:
            try:
                traces[spec.rows] = trace_step(self.config, spec)
            except UntraceableModel as error:
                self._untraceable = error
                raise
            self._fit(kind)
        return traces[spec.rows].step

    def _fit(self, kind: str) -> None:
        traces = self._traces[kind]
        for rows in combinations(sorted(r for r in traces if r >= SMALLEST), 2):
            growth = Growth.between(rows, [traces[r] for r in rows])
            if growth is not None:
                self._growth[kind] = growth
                return

    @property
    def count(self) -> int:
        """How many steps were recorded."""
        return sum(len(traces) for traces in self._traces.values())
