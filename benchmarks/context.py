"""Measures what becomes of activations: memory of each way on this CPU, and whether the fastest is chosen.

    make bench-context                    # memory, against predictions; writes to benchmarks/results/
    make bench-context ARGS=--tiles       # the same of recomputed layers whose MLPs compute in three tiles
    make bench-context ARGS=--in-ram      # and of layers that are recomputed from inputs in RAM
    make bench-context ARGS=--seconds     # on an idle machine: regret of the choice

A way is to keep all activations, to recompute all layers, or to keep those of some layers. Memory is that of
real steps, by the allocator's own events. A CPU has one memory: what a GPU's step would copy to RAM and back
is copied within it, and both are measured, and predicted, as one heap.

For the regret, each way is timed, and the budget is set to what each of them needs: of those that fit, the
one that is predicted to be the fastest is compared with the fastest.
"""

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import inf
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.utils.logging import disable_progress_bar

from benchmarks.cpu_meter import copying_within_ram, measure_step
from benchmarks.measurement_log import RESULTS, made_on, versions, write_result
from benchmarks.sizing import CPU, build, predict, spread
from benchmarks.small_models import NAMES, WIDE, small_config
from benchmarks.step_time import timed_steps
from benchmarks.steps import step_of, step_with
from sft_play.config.schema import LoraSettings
from sft_play.machine.gpus import detect
from sft_play.planning.speed.clock import step_seconds
from sft_play.planning.speed.devices import device_name
from sft_play.planning.speed.measurement import measure
from sft_play.planning.speed.profile import DeviceProfile, MicroBatch
from sft_play.sizing.estimate.estimator import Traces
from sft_play.sizing.step import JoinedRows, PaddedRows, StepSpec
from sft_play.ui.console import console
from sft_play.units import format_bytes
from sft_play.work import mixed

LAYERS, ROWS, ROW_TOKENS = 6, 4, 96
WAYS = {"keep": None, "5 kept": 5, "3 kept": 3, "1 kept": 1, "recompute": 0}  # layers that keep theirs
TILED, IN_RAM = "3 tiles", "inputs in RAM"
RESULT = {TILED: "context_tiles_cpu.json", IN_RAM: "context_in_ram_cpu.json"}
ARCHITECTURES = NAMES[:10]
TARGET = 0.001  # of the peak, with and without the weights
MOST_REGRET = 0.1
ROUNDS = 20  # each of a step in every way


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
    recomputing = "offload" if way == IN_RAM else "recompute"
    return step_of(
        mode=mode,
        lora=LoraSettings(r=8),
        activations="keep" if kept is None else recomputing,
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
        with copying_within_ram():
            real = measure_step(build(folder, spec), replace(spec, cut_at_longest=joined))
        predicted = max(peaks[phase].bytes for phase in real.phases)
        yield Result(name, mode, joined, way, real.weights, predicted, real.peak)


def memory(ways: Sequence[str]) -> int:
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
    path = RESULTS / RESULT.get(ways[0], "context_cpu.json")
    write_result(path, head, {"configurations": [asdict(result) for result in results]})
    for what, found in errors.items():
        console().print(
            f"{len(results)} steps, {what}: median {found['median']:.4%}, worst {found['worst']:.4%}"
        )
    console().print(f"wrote {path}")
    return int(any(found["worst"] > TARGET for found in errors.values()))


def seconds() -> int:
    """Measures the regret of the choice by prediction, and writes it; returns 1 if it misses its target."""
    threads = torch.get_num_threads()
    profile = replace(measure(device_name(detect()), threads), micro_batch_s=0, step_s=0)
    rows, regrets, started = [], [], time.perf_counter()
    for name, mode in product(ARCHITECTURES, ("full", "lora")):
        config = small_config(name, WIDE | {"layers": LAYERS})
        found = [{"architecture": name, "mode": mode, **row} for row in ways_of(config, mode, profile)]
        rows += found
        for budget in (row["peak_bytes"] for row in found):
            fitting = [row for row in found if row["peak_bytes"] <= budget]
            chosen = min(fitting, key=itemgetter("predicted"))
            regrets.append(chosen["measured"] / min(row["measured"] for row in fitting) - 1)
        console().print(f"{name:12} {mode:5} worst regret so far {max(regrets):.1%}")
    found = spread(regrets)
    head = {
        "what": "Seconds of training steps on the CPU, by what becomes of activations; regret of the choice",
        "made_on": made_on(CPU) | {"seconds": round(time.perf_counter() - started)},
        "versions": versions(),
        "regret": {"choices": len(regrets), **found},
    }
    write_result(RESULTS / "context_seconds_cpu.json", head, {"steps": rows})
    console().print(
        f"regret of {len(regrets)} choices: median {found['median']:.1%}, worst {found['worst']:.1%}"
    )
    return int(found["worst"] > MOST_REGRET)


def ways_of(config: PretrainedConfig, mode: str, profile: DeviceProfile) -> list[dict[str, Any]]:
    """The peak of a step in each way, and its seconds, predicted and the least that were measured.

    Steps of all ways take turns, so that a machine that is slow for a while is slow for all of them.
    """
    traces, tokens, rows = Traces(config), ROWS * ROW_TOKENS, {}
    specs = {way: replace(spec_of(mode, way, joined=False), accumulates=False) for way in WAYS}
    for (way, kept), spec in zip(WAYS.items(), specs.values(), strict=True):
        works = [
            traces.work(step_with(spec, activations=each, kept_layers=0)).at(tokens)
            for each in ("keep", "recompute")
        ]
        work = works[kept is not None] if not kept else mixed(works[0], works[1], kept)
        predicted = sum(step_seconds(work, profile, MicroBatch(tokens, tokens * ROW_TOKENS)))
        peak = max(phase.bytes for phase in traces.step(spec).peaks().values())
        rows[way] = {"way": way, "peak_bytes": peak, "predicted": predicted, "measured": inf}
    steps = {way: timed_steps(config, spec) for way, spec in specs.items()}
    for _ in range(ROUNDS):
        for way, timed in steps.items():
            rows[way]["measured"] = min(sum(next(timed)), rows[way]["measured"])
    return list(rows.values())


def main() -> int:
    """Runs the benchmark; returns 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", action="store_true", help="regret of the choice; an idle machine")
    parser.add_argument("--tiles", action="store_true", help="memory with MLPs in tiles")
    parser.add_argument("--in-ram", action="store_true", help="memory with inputs of layers in RAM")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    disable_progress_bar()
    if asked.seconds:
        return seconds()
    if asked.tiles:
        return memory([TILED])
    return memory([IN_RAM] if asked.in_ram else list(WAYS))


if __name__ == "__main__":
    sys.exit(main())
