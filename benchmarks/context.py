"""Measures what becomes of activations: memory of each way on this CPU, and whether the fastest is chosen.

    make bench-context                    # memory, against predictions; writes to benchmarks/results/
    make bench-context ARGS=--tiles       # the same of recomputed layers whose MLPs compute in three tiles
    make bench-context ARGS=--seconds     # on an idle machine: regret of the choice; writes nothing

A way is to keep all activations, to recompute all layers, or to keep those of some layers. Memory is that of
real steps, by the allocator's own events. For the regret, each way is timed, and the budget is set to what
each of them needs: of those that fit, the one that is predicted to be the fastest is compared with the
fastest.
"""

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.utils.logging import disable_progress_bar

from benchmarks.cpu_meter import measure_step
from benchmarks.measurement_log import RESULTS, made_on, versions, write_result
from benchmarks.sizing import CPU, build, predict, spread
from benchmarks.small_models import NAMES, WIDE, small_config
from benchmarks.step_time import measured_step
from sft_play.config.schema import LoraSettings
from sft_play.machine.gpus import detect
from sft_play.planning.clock import step_seconds
from sft_play.planning.measurement import measure
from sft_play.planning.profile import MicroBatch
from sft_play.planning.speed import device_name
from sft_play.runlog import console
from sft_play.sizing.estimator import Traces
from sft_play.sizing.step import JoinedRows, PaddedRows, StepSpec
from sft_play.units import format_bytes
from sft_play.work import mixed

LAYERS, ROWS, ROW_TOKENS = 6, 4, 96
WAYS = {"keep": None, "5 kept": 5, "3 kept": 3, "1 kept": 1, "recompute": 0}  # layers that keep theirs
TILED = "3 tiles"
ARCHITECTURES = NAMES[:10]
TARGET = 0.001  # of the peak, with and without the weights
MOST_REGRET = 0.1


@dataclass(frozen=True)
class Result:
    """A step: bytes predicted and measured, at the peak, with the weights."""

    architecture: str
    mode: str
    joined: bool
    way: str
    weights: int
    predicted: int
    measured: int

    @property
    def error(self) -> float:
        """Relative error of the peak; positive if the prediction is too high."""
        return self.predicted / self.measured - 1

    @property
    def error_above_weights(self) -> float:
        """The same without the weights."""
        return (self.predicted - self.weights) / (self.measured - self.weights) - 1


def spec_of(mode: str, way: str, *, joined: bool) -> StepSpec:
    """The step of a way."""
    kept = WAYS.get(way, 0)
    return StepSpec(
        mode=mode,
        lora=LoraSettings(r=8),
        activations="keep" if kept is None else "recompute",
        kept_layers=kept or 0,
        mlp_tile=ROWS * ROW_TOKENS // 3 if way == TILED else 0,
        batch=JoinedRows(ROWS * ROW_TOKENS) if joined else PaddedRows(ROWS, ROW_TOKENS),
        longest=ROW_TOKENS,
    )


def measured(name: str, config: PretrainedConfig, folder: Path, ways: Sequence[str]) -> Iterator[Result]:
    """Predicts and measures the ways of an architecture."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    traces = Traces(config)
    for (mode, joined), way in product((("full", False), ("lora", True)), ways):
        spec = spec_of(mode, way, joined=joined)
        step = traces.step(spec) if way == TILED else predict(traces, spec)
        peaks = step.peaks()
        real = measure_step(build(folder, spec), replace(spec, cut_at_longest=joined))
        predicted = max(peaks[phase].bytes for phase in real.phases)
        yield Result(name, mode, joined, way, real.weights, predicted, real.peak)


def memory(ways: Sequence[str], file: str) -> int:
    """Measures memory, and writes it to a file of results; returns 1 if a peak misses its target."""
    results, started = [], time.perf_counter()
    for name in ARCHITECTURES:
        with tempfile.TemporaryDirectory() as folder:
            config = small_config(name, WIDE | {"layers": LAYERS})
            for result in measured(name, config, Path(folder), ways):
                results.append(result)
                console().print(
                    f"{name:12} {result.mode:5} {result.way:10} {format_bytes(result.measured):>11}  "
                    f"{result.error:+.4%}, above weights {result.error_above_weights:+.4%}"
                )
    errors = {
        "peak": spread([result.error for result in results]),
        "peak - weights": spread([result.error_above_weights for result in results]),
    }
    head = {
        "what": "Peak memory of real training steps on the CPU, by what becomes of activations",
        "made_on": made_on(CPU) | {"seconds": round(time.perf_counter() - started)},
        "versions": versions(),
        "errors": errors,
    }
    path = RESULTS / file
    write_result(path, head, {"configurations": [asdict(result) for result in results]})
    for what, found in errors.items():
        console().print(
            f"{len(results)} steps, {what}: median {found['median']:.4%}, worst {found['worst']:.4%}"
        )
    console().print(f"wrote {path}")
    return int(any(found["worst"] > TARGET for found in errors.values()))


def seconds() -> int:
    """Measures the regret of choosing a way by prediction; returns 1 if it is more than the target."""
    threads = torch.get_num_threads()
    profile = replace(measure(device_name(detect()), threads), micro_batch_s=0, step_s=0)
    regrets = []
    for name, mode in product(ARCHITECTURES, ("full", "lora")):
        config = small_config(name, WIDE | {"layers": LAYERS})
        traces, tokens = Traces(config), ROWS * ROW_TOKENS
        rows = {}
        for way, kept in WAYS.items():
            spec = replace(spec_of(mode, way, joined=False), accumulates=False)
            works = [
                traces.work(replace(spec, activations=each, kept_layers=0)).at(tokens)
                for each in ("keep", "recompute")
            ]
            work = works[kept is not None] if not kept else mixed(works[0], works[1], kept)
            parts = step_seconds(work, profile, MicroBatch(tokens, tokens * ROW_TOKENS))
            peak = max(phase.bytes for phase in traces.step(spec).peaks().values())
            rows[way] = peak, sum(parts), sum(measured_step(config, spec).values())
        for budget, *_ in rows.values():
            fitting = [row for row in rows.values() if row[0] <= budget]
            chosen, best = min(fitting, key=lambda row: row[1]), min(row[2] for row in fitting)
            regrets.append(chosen[2] / best - 1)
        console().print(f"{name:12} {mode:5} worst regret so far {max(regrets):.1%}")
    found = spread(regrets)
    console().print(
        f"regret of {len(regrets)} choices: median {found['median']:.1%}, worst {found['worst']:.1%}"
    )
    return int(found["worst"] > MOST_REGRET)


def main() -> int:
    """Runs the benchmark; returns 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", action="store_true", help="regret of the choice; an idle machine")
    parser.add_argument("--tiles", action="store_true", help="memory with MLPs in tiles")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    disable_progress_bar()
    if asked.seconds:
        return seconds()
    return (
        memory([TILED], "context_tiles_cpu.json") if asked.tiles else memory(list(WAYS), "context_cpu.json")
    )


if __name__ == "__main__":
    sys.exit(main())
