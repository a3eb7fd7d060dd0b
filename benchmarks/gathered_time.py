"""CPU seconds of steps whose weights stay gathered for the backward pass, against those that gather again.

    python -m benchmarks.gathered_time

Two processes of this CPU train the same small model in both ways, in turn, round by round, and compare their
losses bit for bit. The seconds are those of the processor, of both processes, not of a clock on the wall:
what else runs on the machine then hardly matters, and neither does waiting.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from benchmarks.measurement_log import RESULTS, versions, write_result
from benchmarks.random_models import random_model
from benchmarks.small_models import WIDE, small_config
from sft_play.choices.optimizers import make_optimizer
from sft_play.config.schema import LoraSettings, TuningConfig
from sft_play.engines.shards import shard
from sft_play.model.architecture.shape import units_of
from sft_play.model.layers.loss_head import add_loss_head
from sft_play.sizing.step import PaddedRows, StepSpec
from sft_play.sizing.trace.trace import forward, make_batch, prepare_for_training, trained_parameters
from sft_play.ui.console import console

ROUNDS, STEPS, MICRO_BATCHES, SEED = 10, 2, 2, 76
CASES = [(mode, tokens) for mode in ("full", "lora") for tokens in (32, 256)]


def trained(mode: str, tokens: int, *, freed: bool) -> Callable[[], tuple[float, list[float]]]:
    """A function that trains for STEPS, and returns this process's CPU seconds and losses."""
    spec = StepSpec(mode=mode, lora=LoraSettings(r=8), batch=PaddedRows(2, tokens))
    torch.manual_seed(SEED)
    config = small_config("llama", WIDE | {"layers": 6, "vocabulary": 2000})
    model = random_model(config, spec, TuningConfig(mode=mode, lora=spec.lora), torch.device("cpu"))
    shard(units_of(model), "cpu", reshard_after_forward=freed)
    add_loss_head(model if mode == "full" else model.get_base_model())
    prepare_for_training(model, spec)
    optimizer = make_optimizer("adamw", trained_parameters(model))

    def train() -> tuple[float, list[float]]:
        began, losses = time.process_time(), []
        for _ in range(STEPS):
            for _ in range(MICRO_BATCHES):
                loss = forward(model, make_batch(spec), spec)
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return time.process_time() - began, losses

    return train


def rounds(mode: str, tokens: int) -> Iterator[dict[bool, float]]:
    """CPU seconds of both processes in each round, by whether weights were freed; in turn, then reversed."""
    ways = {freed: trained(mode, tokens, freed=freed) for freed in (True, False)}
    for number in range(-1, ROUNDS):
        seconds, losses = dict[bool, float](), list[list[float]]()
        for freed in (True, False) if number % 2 else (False, True):
            distributed.barrier()
            own, learned = ways[freed]()
            losses.append(learned)
            both = torch.tensor(own, dtype=torch.float64)
            distributed.all_reduce(both)
            seconds[freed] = both.item()
        assert losses[0] == losses[1], (mode, tokens, losses)
        if number >= 0:  # FSDP2 sets itself up in the first one
            yield seconds


def work(out: Path) -> None:
    """What each process does; the first one writes the result."""
    distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for mode, tokens in CASES:
        found = list(rounds(mode, tokens))
        ratios = sorted(each[False] / each[True] for each in found)
        median = statistics.median(ratios)
        shares = [round(ratio, 4) for ratio in ratios]
        rows.append({"mode": mode, "row_tokens": tokens, "ratio": round(median, 4), "ratios": shares})
        if distributed.get_rank() == 0:
            console().print(f"{mode} {tokens}: {median:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")
    if distributed.get_rank() == 0:
        what = "CPU seconds with weights that stay gathered / with weights that are gathered again"
        write_result(out, {"what": what, "versions": versions(), "same_losses": True}, {"rows": rows})
    distributed.destroy_process_group()


def main() -> None:
    """Runs the benchmark, or is one of its processes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "gathered_time.json")
    out = parser.parse_args().out
    warnings.simplefilter("ignore")
    if "RANK" in os.environ:
        work(out)
        return
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *launch, "-m", "benchmarks.gathered_time", "--out", str(out)]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run(command, env=os.environ | environment, check=True)


if __name__ == "__main__":
    main()
