"""How right the memory prediction is: real steps of small models on this CPU, and measurements that others have published.

    make bench-sizing                  # both, into benchmarks/results/
    make bench-sizing ARGS=--quick     # a fifth of the grid, nothing written

A configuration's peak is predicted from recordings on fake tensors of three of its layers and of other micro-batches, then
measured by the allocator's own events while the model takes real optimizer steps.
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

from benchmarks.lines import RESULTS, versions, write_result
from benchmarks.published import figures, published_table
from benchmarks.published import write as write_published
from benchmarks.small_models import NAMES, TALL, WIDE, small_config
from sft_play import attention
from sft_play.config.schema import LoraSettings, ModelConfig
from sft_play.model import attach_adapter, load_base
from sft_play.runlog import console
from sft_play.sizing.measure import Measurement, measure_step
from sft_play.sizing.recordings import Recordings
from sft_play.sizing.step import StepSpec
from sft_play.sizing.timeline import Step
from sft_play.units import format_bytes

TARGETS = {"median": 0.0005, "p95": 0.005, "worst": 0.01}
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    """A geometry of the model and a micro-batch."""

    name: str
    geometry: dict[str, int]
    rows: int
    row_tokens: int
    mixed_precision: str
    lora_rank: int = 8


SHAPES = (Shape("wide", WIDE, 4, 96, "no"), Shape("tall", TALL, 5, 64, "bf16"))


@dataclass(frozen=True)
class Result:
    """One configuration: bytes predicted and measured, with the weights in them."""

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
        """Of the peak, relative and signed: positive means predicted too much."""
        return max(self.predicted.values()) / max(self.measured.values()) - 1

    @property
    def error_above_weights(self) -> float:
        """The same for what is not weights."""
        return (max(self.predicted.values()) - self.weights) / (max(self.measured.values()) - self.weights) - 1

    @property
    def error_in_layers(self) -> float:
        """Of the highest moment while a decoder layer is at work, above the weights: the loss head does not hide it."""
        return (max(self.predicted_in_layers.values()) - self.weights) / (
            max(self.measured_in_layers.values()) - self.weights
        ) - 1


def specs(shape: Shape) -> Iterator[StepSpec]:
    """The training steps of a shape."""
    for mode, checkpointing, packing in product(("full", "lora", "qlora"), (False, True), (False, True)):
        yield spec_of(shape, mode, checkpointing, packing)


def spec_of(shape: Shape, mode: str, checkpointing: bool, packing: bool) -> StepSpec:
    """One of them."""
    return StepSpec(
        mode=mode,
        lora=LoraSettings(r=shape.lora_rank),
        mixed_precision=shape.mixed_precision,
        gradient_checkpointing=checkpointing,
        packing=packing,
        rows=shape.rows,
        row_tokens=shape.row_tokens,
    )


def build(folder: Path, spec: StepSpec) -> Any:
    """The model as the trainer builds it."""
    quantize = spec.mode == "qlora"
    model = load_base(
        ModelConfig(name=str(folder)), dtype="float32", attn_implementation=attention.NAME, device=CPU, quantize=quantize
    )
    model.config.use_cache = False
    return model if spec.mode == "full" else attach_adapter(model, spec.lora)


def predict(recordings: Recordings, spec: StepSpec) -> Step:
    """The step, recorded at two and three rows, so that the micro-batch itself is never traced."""
    for rows in (2, 3):
        recordings.step(replace(spec, rows=rows))
    return recordings.step(spec)


def run_shape(name: str, config: PretrainedConfig, shape: Shape, folder: Path, quick: bool) -> Iterator[Result]:
    """Predicts and measures the steps of one architecture in one shape."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    recordings = Recordings(config)
    for spec in list(specs(shape))[:: 5 if quick else 1]:
        step = predict(recordings, spec)
        # The real packed batch has one sequence for each row, the traced one two halves.
        measured: Measurement = measure_step(build(folder, spec), replace(spec, one_by_one=spec.packing))
        yield Result(
            architecture=name,
            mode=spec.mode,
            checkpointing=spec.gradient_checkpointing,
            packing=spec.packing,
            shape=shape.name,
            weights=measured.weights,
            predicted={phase: peak.bytes for phase, peak in step.peaks().items() if phase in measured.phases},
            measured=measured.phases,
            predicted_in_layers={p: peak.bytes for p, peak in step.peaks(in_layers=True).items() if p in measured.in_layers},
            measured_in_layers=measured.in_layers,
        )


def grid(quick: bool) -> list[Result]:
    """All configurations, one line each as they are done."""
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
    "No peak is off by more than single numbers that operations hold inside. Within decoder layers the 'tall' steps, which "
    "compute in bf16 under autocast, are under-predicted by up to 262 kB: scratch memory of oneDNN's bf16 matrix products on "
    "the CPU, which no operation returns. The 'wide' steps in fp32 have none."
)


def line(result: Result) -> str:
    """A configuration and its errors."""
    return (
        f"{result.shape} {result.architecture:12} {result.mode:5} {'recomputed' if result.checkpointing else 'kept':10} "
        f"{'packed' if result.packing else 'padded'} {format_bytes(max(result.measured.values())):>11}  "
        f"peak {result.error:+.4%}  above weights {result.error_above_weights:+.4%}  in layers {result.error_in_layers:+.4%}"
    )


def spread(errors: list[float]) -> dict[str, float]:
    """Of the absolute errors: median, 95th percentile, worst; and the mean of the signed ones."""
    sizes = sorted(abs(error) for error in errors)
    p95 = sizes[min(len(sizes) - 1, math.ceil(0.95 * len(sizes)) - 1)]
    return {"median": statistics.median(sizes), "p95": p95, "worst": sizes[-1], "bias": statistics.mean(errors)}


MEASURES = {
    "peak": "error",
    "peak - weights": "error_above_weights",
    "highest in a decoder layer - weights": "error_in_layers",
}


def summary_table(results: list[Result]) -> Table:
    """The spread of each error, beside the target."""
    table = Table(title=f"Predicted against measured: {len(results)} real steps on the CPU")
    for name in ("error of", "median", "95th percentile", "worst", "mean signed"):
        table.add_column(name, justify="left" if name == "error of" else "right")
    for name, attribute in MEASURES.items():
        found = spread([getattr(result, attribute) for result in results])
        table.add_row(name, *(f"{found[key]:.5%}" for key in ("median", "p95", "worst")), f"{found['bias']:+.5%}")
    table.add_row("target for the first two", *(f"{TARGETS[key]:.2%}" for key in ("median", "p95", "worst")), "", style="dim")
    return table


def write(results: list[Result], seconds: float) -> Path:
    """All numbers, with what they were made on."""
    head = {
        "what": "Peak memory of real training steps on the CPU, predicted from fake tensors and measured by the allocator",
        "made_on": {"cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads(), "seconds": seconds},
        "versions": versions(),
        "targets": TARGETS,
        "errors": {name: spread([getattr(r, attribute) for r in results]) for name, attribute in MEASURES.items()},
        "outliers": OUTLIERS,
        "shapes": [asdict(shape) for shape in SHAPES],
    }
    rows = [asdict(result) | {attribute: getattr(result, attribute) for attribute in MEASURES.values()} for result in results]
    path = RESULTS / "sizing_cpu.json"
    write_result(path, head, {"configurations": rows})
    return path


def main() -> int:
    """Runs, prints and writes; 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fifth of the grid, nothing written")
    quick = parser.parse_args().quick
    warnings.simplefilter("ignore")
    disable_progress_bar()
    started = time.perf_counter()
    results = grid(quick)
    console().print(summary_table(results))
    if not quick:
        console().print(f"written: {write(results, round(time.perf_counter() - started))}")
    published = figures()
    console().print(published_table(published))
    if not quick:
        console().print(f"written: {write_published(published)}")
    missed = [
        f"{name}: {key}"
        for name in ("error", "error_above_weights")
        for key, size in spread([getattr(result, name) for result in results]).items()
        if key in TARGETS and size > TARGETS[key]
    ]
    if missed:
        console().print(f"[red]missed targets: {', '.join(missed)}[/]")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
