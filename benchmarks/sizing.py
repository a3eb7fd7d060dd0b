"""Measures the accuracy of the memory prediction, on real steps of small models and on published figures.

    make bench-sizing                  # writes to benchmarks/results/
    make bench-sizing ARGS=--quick     # a fifth of the grid; writes nothing

The peak of a configuration is predicted from traces of three of its layers and of other micro-batch sizes,
then measured by the allocator's own events while the model takes real optimizer steps on this CPU.
"""

import argparse
import math
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.utils.logging import disable_progress_bar

from benchmarks.cpu_meter import Measurement, measure_step
from benchmarks.measurement_log import RESULTS, versions, write_result
from benchmarks.published import figures, published_table
from benchmarks.published import write as write_published
from benchmarks.small_models import NAMES, TALL, WIDE, small_config
from benchmarks.steps import step_of
from sft_play.config.schema import LoraSettings, ModelConfig
from sft_play.model.adapters.attach import attach_adapter
from sft_play.model.attention import varlen
from sft_play.model.build import load_base
from sft_play.sizing.estimate.estimator import Traces
from sft_play.sizing.step import JoinedRows, PaddedRows, StepSpec
from sft_play.timeline import Peak, Step
from sft_play.ui.console import console
from sft_play.units import format_bytes

# By autocast type, of the peak with and without the weights.
TARGETS = {
    "no": {"median": 0.00005, "p95": 0.0001, "worst": 0.0001},
    "bf16": {"median": 0.0005, "p95": 0.02, "worst": 0.03},
}
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    """A model geometry and a micro-batch."""

    name: str
    geometry: dict[str, int]
    rows: int
    row_tokens: int
    mixed_precision: str
    lora_rank: int = 8


SHAPES = (Shape("wide", WIDE, 4, 96, "no"), Shape("tall", TALL, 5, 64, "bf16"))


@dataclass(frozen=True)
class Result:
    """One configuration: predicted and measured bytes, which include the weights."""

    architecture: str
    mode: str
    checkpointing: bool
    packing: bool
    shape: str
    weights: int
    predicted: dict[str, int]
    measured: dict[str, int]
    predicted_in_layers: dict[str, int]
    measured_in_layers: dict[str, int]

    @property
    def error(self) -> float:
        """Relative error of the peak; positive if the prediction is too high."""
        return max(self.predicted.values()) / max(self.measured.values()) - 1

    @property
    def error_above_weights(self) -> float:
        """The same for the peak without the weights."""
        return self._error_above_weights(self.predicted, self.measured)

    @property
    def error_in_layers(self) -> float:
        """The same for the peak while a decoder layer is running, which the loss head cannot mask."""
        return self._error_above_weights(self.predicted_in_layers, self.measured_in_layers)

    def _error_above_weights(self, predicted: dict[str, int], measured: dict[str, int]) -> float:
        above_weights = max(predicted.values()) - self.weights
        return above_weights / (max(measured.values()) - self.weights) - 1


def specs(shape: Shape) -> Iterator[StepSpec]:
    """All training steps of a shape."""
    for mode, checkpointing, packing in product(("full", "lora", "qlora"), (False, True), (False, True)):
        yield spec_of(shape, mode, checkpointing, packing)


def spec_of(shape: Shape, mode: str, checkpointing: bool, packing: bool) -> StepSpec:
    """One training step of a shape.

    Args:
        shape: geometry and micro-batch.
        mode: "full", "lora" or "qlora".
        checkpointing: whether activations are recomputed.
        packing: whether rows are packed.
    """
    tokens = shape.rows * shape.row_tokens
    return step_of(
        mode=mode,
        lora=LoraSettings(r=shape.lora_rank),
        mixed_precision=shape.mixed_precision,
        activations="recompute" if checkpointing else "keep",
        batch=JoinedRows(tokens) if packing else PaddedRows(shape.rows, shape.row_tokens),
        longest=shape.row_tokens,
    )


def build(folder: Path, spec: StepSpec) -> Any:
    """The model as the trainer builds it."""
    quantize = spec.mode == "qlora"
    model = load_base(
        ModelConfig(name=str(folder)),
        dtype="float32",
        attn_implementation=varlen.NAME,
        device=CPU,
        quantize=quantize,
    )
    model.config.use_cache = False
    if spec.mode == "full":
        return model
    return attach_adapter(model, spec.lora, autocast=spec.precision.autocast != "no")


def predict(traces: Traces, spec: StepSpec) -> Step:
    """The step, from traces with more rows: the micro-batch itself is not traced."""
    row = spec.longest_sequence if spec.joined else 1
    for more in (1, 3):
        traces.step(replace(spec, batch=spec.batch.of_size(spec.batch.size + more * row)))
    return traces.step(spec)


def run_shape(
    name: str, config: PretrainedConfig, shape: Shape, folder: Path, quick: bool
) -> Iterator[Result]:
    """Predicts and measures the steps of one architecture in one shape.

    Args:
        name: of the architecture.
        config: the architecture.
        shape: geometry and micro-batch.
        folder: where the model is saved.
        quick: a fifth of the steps only.
    """
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    traces = Traces(config)
    for spec in list(specs(shape))[:: 5 if quick else 1]:
        step = predict(traces, spec)
        # The real packed batch has one sequence per row, the traced one has two halves.
        measured: Measurement = measure_step(build(folder, spec), replace(spec, cut_at_longest=spec.joined))
        peaks, in_layers = step.peaks(), step.peaks(in_layers=True)
        yield Result(
            architecture=name,
            mode=spec.mode,
            checkpointing=spec.activations.policy == "recompute",
            packing=spec.joined,
            shape=shape.name,
            weights=measured.weights,
            predicted=_bytes_of(peaks, measured.phases),
            measured=measured.phases,
            predicted_in_layers=_bytes_of(in_layers, measured.in_layers),
            measured_in_layers=measured.in_layers,
        )


def _bytes_of(peaks: dict[str, Peak], measured: dict[str, int]) -> dict[str, int]:
    """Predicted bytes of the phases that were measured."""
    return {phase: peak.bytes for phase, peak in peaks.items() if phase in measured}


def grid(quick: bool) -> list[Result]:
    """All configurations; prints a line for each when it is done."""
    results = []
    for shape in SHAPES:
        for name in NAMES:
            with tempfile.TemporaryDirectory() as folder:
                config = small_config(name, shape.geometry)
                for result in run_shape(name, config, shape, Path(folder), quick):
                    results.append(result)
                    console().print(line(result), highlight=False, soft_wrap=True)
    return results


OUTLIERS = (
    "In fp32 ('wide') no peak is off by more than scalars that operations allocate inside. The 'tall' steps "
    "compute in bf16 under autocast; where their peak is in a decoder layer, it is under-predicted by up to "
    "262 kB: scratch memory of oneDNN's bf16 matrix products on the CPU, which no operation returns."
)


def line(result: Result) -> str:
    """A configuration and its errors."""
    activations = "recomputed" if result.checkpointing else "stored"
    layout = "packed" if result.packing else "padded"
    peak = format_bytes(max(result.measured.values()))
    return (
        f"{result.shape} {result.architecture:12} {result.mode:5} {activations:10} {layout} {peak:>11}  "
        f"peak {result.error:+.4%}  above weights {result.error_above_weights:+.4%}  "
        f"in layers {result.error_in_layers:+.4%}"
    )


def spread(errors: list[float]) -> dict[str, float]:
    """Median, 95th percentile and worst of the absolute errors, and the mean of the signed ones."""
    sizes = sorted(abs(error) for error in errors)
    p95 = sizes[min(len(sizes) - 1, math.ceil(0.95 * len(sizes)) - 1)]
    return {
        "median": statistics.median(sizes),
        "p95": p95,
        "worst": sizes[-1],
        "bias": statistics.mean(errors),
    }


MEASURES = {
    "peak": "error",
    "peak - weights": "error_above_weights",
    "highest in a decoder layer - weights": "error_in_layers",
}


def summary_table(results: list[Result]) -> Table:
    """The spread of each error, with the targets."""
    table = Table(title=f"Predicted against measured memory: {len(results)} real steps on the CPU")
    for name in ("error of", "median", "95th percentile", "worst", "mean signed"):
        table.add_column(name, justify="left" if name == "error of" else "right")
    for name, attribute in MEASURES.items():
        found = spread([getattr(result, attribute) for result in results])
        table.add_row(
            name, *(f"{found[key]:.5%}" for key in ("median", "p95", "worst")), f"{found['bias']:+.5%}"
        )
    for autocast, targets in TARGETS.items():
        found = spread([result.error for result in of_autocast(results, autocast)])
        table.add_row(f"peak, autocast {autocast}", *(f"{found[key]:.5%}" for key in targets), "")
        table.add_row("its target", *(f"{most:.3%}" for most in targets.values()), "", style="dim")
    return table


def of_autocast(results: list[Result], autocast: str) -> list[Result]:
    """The results of the shapes that compute in this type."""
    shapes = {shape.name for shape in SHAPES if shape.mixed_precision == autocast}
    return [result for result in results if result.shape in shapes]


def write(results: list[Result], seconds: float) -> Path:
    """Writes results/sizing_cpu.json: all numbers, with hardware and versions."""
    errors = {}
    for name, attribute in MEASURES.items():
        errors[name] = spread([getattr(result, attribute) for result in results])
    head = {
        "what": "Peak memory of real training steps on the CPU, predicted by traces and measured",
        "made_on": {
            "cpu": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "seconds": seconds,
        },
        "versions": versions(),
        "targets": TARGETS,
        "errors": errors,
        "outliers": OUTLIERS,
        "shapes": [asdict(shape) for shape in SHAPES],
    }
    rows = []
    for result in results:
        rows.append(asdict(result) | {name: getattr(result, name) for name in MEASURES.values()})
    path = RESULTS / "sizing_cpu.json"
    write_result(path, head, {"configurations": rows})
    return path


def main() -> int:
    """Runs the benchmark; returns 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a fifth of the grid; write no result")
    quick = parser.parse_args().quick
    warnings.simplefilter("ignore")
    disable_progress_bar()
    started = time.perf_counter()
    results = grid(quick)
    console().print(summary_table(results))
    if not quick:
        console().print(f"wrote {write(results, round(time.perf_counter() - started))}")
    published = figures()
    console().print(published_table(published))
    if not quick:
        console().print(f"wrote {write_published(published)}")
    missed = []
    for (autocast, targets), name in product(TARGETS.items(), ("error", "error_above_weights")):
        found = spread([getattr(result, name) for result in of_autocast(results, autocast)])
        missed += [f"{autocast} {name}: {key}" for key, target in targets.items() if found[key] > target]
    if missed:
        console().print(f"missed targets: {', '.join(missed)}", style="red")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
