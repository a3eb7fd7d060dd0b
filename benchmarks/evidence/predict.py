"""Predictions of measured rows, and their errors."""

import math
import statistics
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from transformers import PretrainedConfig

from benchmarks.evidence.habits import Habits, history
from benchmarks.evidence.runs import Head, Row, Run, Source
from benchmarks.evidence.seconds import tokens_per_second
from benchmarks.evidence.steps import head_peak, trace_run, warmup_bytes
from sft_play.cache import entry, read_value, write_value
from sft_play.fingerprints import PACKAGE, sources_digest
from sft_play.machine.gpus import what_if
from sft_play.sizing.estimate.allocator import replay
from sft_play.sizing.estimate.budget import (
    ASSUMED_CONTEXT,
    CONTEXTS,
    CUDA_GRANULARITY,
    HANDLES,
    cublas_workspace,
)
from sft_play.sizing.step import step_code
from sft_play.timeline import PHASES, Step
from sft_play.units import MIB

SPEED = "tokens_per_second"
KINDS = ("allocated", "reserved", "process")


def predict(row: Row) -> dict[str, float]:
    """Predicted MiB under the keys of `Row.measured`, cached by content; `tokens_per_second` if it is asked.

    The peaks of the run come from a replay of the allocator, which gives a block whole if little would
    remain; `after_load`, phases and `after_step` are sums of tensors.
    """
    if isinstance(row.run, Head):
        return {"allocated": head_bytes(row.run) / MIB}
    assert row.config is not None
    path = entry("evidence", row.config.to_json_string(use_diff=False), row.run, *_code())
    found = read_value(path)
    if found is None:
        trace = trace_run(row.config, row.run)
        found = {name: size / MIB for name, size in _bytes(trace.step, row.config, row.run).items()}
        if row.run.gpu:
            found[SPEED] = tokens_per_second(trace, row.run)
        write_value(path, found)
    return found


def _code() -> tuple[str, ...]:
    clock = (PACKAGE / "planning", PACKAGE.parent / "configs" / "hardware.yaml")
    return step_code(), sources_digest(Path(__file__).parent), sources_digest(*clock)


def head_bytes(head: Head) -> int:
    """Peak of a loss alone; a product needs cuBLAS."""
    workspace = 0 if head.head == "cross_entropy" else HANDLES * cublas_workspace(head.compute_capability)
    return head_peak(head) + workspace


def _bytes(step: Step, config: PretrainedConfig, run: Run) -> dict[str, int]:
    """Predicted bytes of a run of such steps, under the keys of `Row.measured`."""
    workspace = cublas_workspace(run.compute_capability)
    habits = Habits(
        workspace_bytes=workspace,
        warmup_bytes=warmup_bytes(config, run) if run.warmup else 0,
        clears_cache=run.clears_cache,
        holds_outputs=run.outputs_kept_until == "next forward",
    )
    context = CONTEXTS.get(run.compute_capability, ASSUMED_CONTEXT)
    capacity = what_if(run.gpu, 1).gpus[0].total_bytes - context if run.gpu else math.inf
    replayed = replay(history(step, habits), expandable=run.expandable, capacity=capacity)
    peaks = step.rounded(CUDA_GRANULARITY).peaks()
    return {
        "allocated": replayed.allocated,
        "reserved": replayed.reserved,
        "process": replayed.reserved + context,
        "after_load": live_after(step, "load"),
        "after_step": live_after(step, "optimizer") + HANDLES * workspace,
        **{
            phase: peaks[phase].bytes + HANDLES * workspace
            for phase in ("forward", "backward", "optimizer")
            if phase in peaks
        },
    }


def live_after(step: Step, phase: str) -> int:
    """Bytes that are live when a phase has ended."""
    line = step.timeline
    until = np.flatnonzero(line.phases <= PHASES.index(phase))[-1]
    return int(line.changes(step.rounded(CUDA_GRANULARITY).sizes)[: until + 1].sum())


def errors_of(source: Source) -> list[dict]:
    """Each row with its prediction and relative errors, positive if the prediction is too high."""
    rows = []
    for row in source.rows:
        found = predict(row)
        rows.append(
            {
                "name": row.name,
                "measured_mib": row.measured,
                "predicted_mib": {name: round(found[name], 3) for name in row.measured if name in found},
                "errors": _relative(found, row.measured),
                "publisher_errors": _relative(row.publisher, row.measured),
            }
            | _speed(found, row)
        )
    return rows


def _speed(found: dict[str, float], row: Row) -> dict[str, dict[str, float]]:
    """Tokens per second, if they were measured; the error is positive if the prediction is too fast."""
    measured = row.tokens_per_second
    if measured is None:
        return {}
    error = round(found[SPEED] / measured - 1, 6)
    return {SPEED: {"measured": measured, "predicted": round(found[SPEED], 1), "error": error}}


def _relative(found: dict[str, float], measured: dict[str, float]) -> dict[str, float]:
    both = [name for name in measured if name in found]
    return {name: round(found[name] / measured[name] - 1, 6) for name in both}


def spread(errors: Iterable[float]) -> dict[str, float] | None:
    """Median and worst of the sizes of errors, the worst with its sign; None if there are none."""
    known = [error for error in errors if not math.isnan(error)]
    if not known:
        return None
    return {"median": statistics.median(map(abs, known)), "worst": max(known, key=abs)}


def summary(rows: list[dict]) -> dict[str, dict[str, float] | None]:
    """The spread of each kind of error, and of the publisher's own predictions."""
    kinds = (*KINDS, "after_step")
    found = {kind: spread(row["errors"].get(kind, math.nan) for row in rows) for kind in kinds}
    theirs = {kind: spread(row["publisher_errors"].get(kind, math.nan) for row in rows) for kind in KINDS}
    found[SPEED] = spread(row[SPEED]["error"] for row in rows if SPEED in row)
    return found | {f"publisher_{kind}": value for kind, value in theirs.items()}


def described(source: Source, rows: list[dict]) -> dict:
    """A source with its rows and their summary, for the results file."""
    about = {key: value for key, value in source.about.items() if key not in ("settings", "described")}
    return {"source": source.name, **about, "summary": summary(rows), "rows": rows}
