"""Measures the accuracy of the predicted step time, on real steps of small models on this CPU.

    make bench-step-time                     # all threads
    make bench-step-time ARGS="--threads 1"  # on a busy machine, so that CPU time can be used

A step is forward, backward, clipping and AdamW on one micro-batch. Its operations come from traces at other
token counts, so no step is predicted from itself. The device profile is measured first.
"""

import argparse
import statistics
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from rich.table import Table
from transformers import PretrainedConfig

from benchmarks.random_models import random_model
from benchmarks.small_models import small_config
from benchmarks.steps import step_of
from sft_play.config.schema import TuningConfig
from sft_play.machine.gpus import detect
from sft_play.model.layers.cpu import keep_freed_memory
from sft_play.model.layers.loss_head import add_loss_head
from sft_play.planning.speed.clock import StepSeconds, step_seconds
from sft_play.planning.speed.devices import device_name
from sft_play.planning.speed.measurement import measure, now, since
from sft_play.planning.speed.profile import DeviceProfile, MicroBatch
from sft_play.sizing.estimate.estimator import Traces
from sft_play.sizing.step import PaddedRows, StepSpec
from sft_play.sizing.trace.trace import forward, make_batch, prepare_for_training, trained_parameters
from sft_play.ui.console import console
from sft_play.work import PRODUCT, TIMES, K, M, N, Work

CPU = torch.device("cpu")
GEOMETRIES = {
    "2M": dict(hidden=128, inner=352, heads=4, groups=2, head_dim=32, vocabulary=4000, layers=4),
    "12M": dict(hidden=256, inner=704, heads=8, groups=4, head_dim=32, vocabulary=8000, layers=8),
    "50M": dict(hidden=512, inner=1408, heads=8, groups=4, head_dim=64, vocabulary=16000, layers=10),
}
TOKENS = (64, 512, 2048, 4096)
ROW_TOKENS = 256
MOST_FLOP = 4e11  # longer steps are skipped
MOST_S, RUNS = 4.0, 20


@dataclass(frozen=True)
class Result:
    """A step: seconds predicted and measured."""

    model: str
    mode: str
    checkpointing: bool
    tokens: int
    predicted: StepSeconds
    measured: dict[str, float]  # forward, backward, update

    @property
    def error(self) -> float:
        """Relative error; positive if the predicted time is too long."""
        return sum(self.predicted) / sum(self.measured.values()) - 1


def measured_step(config: PretrainedConfig, spec: StepSpec) -> dict[str, float]:
    """The minimum time of each part over several real steps."""
    steps, times = timed_steps(config, spec), list[tuple[float, ...]]()
    while len(times) < 2 or (len(times) < RUNS and sum(map(sum, times)) < MOST_S):
        times.append(next(steps))
    return dict(zip(("forward", "backward", "update"), map(min, zip(*times, strict=True)), strict=True))


def timed_steps(config: PretrainedConfig, spec: StepSpec) -> Iterator[tuple[float, float, float]]:
    """Seconds of forward pass, backward pass and update of one real step after the other, without end."""
    keep_freed_memory()  # as a run does
    model = random_model(config, spec, TuningConfig(mode=spec.mode), CPU)  # type: ignore[arg-type]
    add_loss_head(model)
    prepare_for_training(model, spec)
    parameters = trained_parameters(model)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    batch = make_batch(spec)
    while True:
        began = now()
        loss = forward(model, batch, spec)
        first, began = since(began), now()
        loss.backward()
        second, began = since(began), now()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield first, second, since(began)


def flop(work: Work) -> np.ndarray:
    """Floating-point operations of each operation in `work.order`, [n]: 2 m n k of a matrix product."""
    sizes = work.sizes
    products = 2 * sizes[:, M] * sizes[:, N] * sizes[:, K] * sizes[:, TIMES] * (work.kinds == PRODUCT)
    return products[work.order]


def results(profile: DeviceProfile) -> Iterator[Result]:
    """Predicts and measures the steps of each model, mode and token count."""
    for name, geometry in GEOMETRIES.items():
        config = small_config("llama", geometry)
        traces = Traces(config)
        for mode, activations in product(("full", "lora"), ("keep", "recompute")):
            spec = step_of(
                mode=mode,
                activations=activations,
                batch=PaddedRows(2, ROW_TOKENS),
                accumulates=False,
            )  # fmt: skip
            line = traces.work(spec)
            for tokens in TOKENS:
                row = min(tokens, ROW_TOKENS)
                work = line.at(tokens)
                if flop(work).sum() > MOST_FLOP:
                    continue
                real = step_of(mode=mode, activations=activations, batch=PaddedRows(tokens // row, row))
                yield Result(
                    name,
                    mode,
                    activations == "recompute",
                    tokens,
                    step_seconds(work, profile, MicroBatch(tokens, tokens * row)),
                    measured_step(config, real),
                )


def line_of(result: Result) -> str:
    """A step and its error, with the parts."""
    parts = "  ".join(
        f"{name} {getattr(result.predicted, name) * 1e3:,.0f}/{seconds * 1e3:,.0f}"
        for name, seconds in result.measured.items()
    )
    kept = "recomputed" if result.checkpointing else "kept"
    what = f"{result.model:>4} {result.mode:4} {kept:10} {result.tokens:>5} tokens"
    return f"{what}  {result.error:+6.0%}   {parts} ms"


def summary_table(errors: list[float]) -> Table:
    """The spread of the errors."""
    sizes = [abs(error) for error in errors]
    table = Table(title=f"Predicted against measured seconds: {len(errors)} real steps on the CPU")
    for name in ("median", "worst", "mean signed"):
        table.add_column(name, justify="right")
    table.add_row(f"{statistics.median(sizes):.1%}", f"{max(sizes):.1%}", f"{statistics.mean(errors):+.1%}")
    return table


def main() -> int:
    """Measures the profile, then the steps, and prints the errors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    threads = parser.parse_args().threads
    warnings.simplefilter("ignore")
    profile = replace(measure(device_name(detect()), threads), micro_batch_s=0, step_s=0)  # no trainer here
    console().print(f"{profile.device}, {threads} threads: {profile.source}")
    torch.set_num_threads(threads)
    errors = []
    for result in results(profile):
        errors.append(result.error)
        console().print(line_of(result), highlight=False, soft_wrap=True)
    console().print(summary_table(errors))
    return 0


if __name__ == "__main__":
    sys.exit(main())
