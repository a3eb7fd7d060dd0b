"""CPU seconds of the first step with compiled layers: with nothing kept, and in the next process of its kind.

    python -m benchmarks.compiler_cache

A small model with adapters takes one step on joined rows, in a process of its own, whose first step compiles.
Then another process does, on rows of other lengths: it finds what the first one has kept. Each pair begins
with an empty folder.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from benchmarks.compiled import GEOMETRY
from benchmarks.context import spec_of
from benchmarks.measurement_log import RESULTS, made_on, versions, write_result
from benchmarks.sizing import CPU, build
from benchmarks.small_models import small_config
from sft_play.model.compilation import compile_layers
from sft_play.model.loss_head import add_loss_head
from sft_play.sizing.step import JoinedRows
from sft_play.sizing.trace import forward, make_batch, prepare_for_training
from sft_play.ui.console import console

PAIRS = 1
LENGTHS = ((60, 130, 7), (96, 20, 33, 41))


def cpu_seconds() -> float:
    """Of this process and of those that it has started, which compile."""
    return sum(os.times()[:4])


def first_step(lengths: tuple[int, ...]) -> dict[str, object]:
    """CPU seconds of a first step on joined rows, and what was found of what is kept."""
    torch.set_num_threads(1)
    spec = replace(spec_of("lora", "keep", joined=True), batch=JoinedRows(sum(lengths)), lengths=lengths)
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(small_config("llama", GEOMETRY)).save_pretrained(folder)
        model = build(Path(folder), spec)
    add_loss_head(model)
    prepare_for_training(model, spec)
    compile_layers(model)
    batch, began = make_batch(spec), cpu_seconds()
    forward(model, batch, spec).backward()
    seconds = round(cpu_seconds() - began, 2)
    graphs, hits = counters["stats"]["unique_graphs"], counters["aot_autograd"]["autograd_cache_hit"]
    return {"lengths": lengths, "cpu_seconds": seconds, "graphs": graphs, "hits": hits}


def pair() -> dict[str, dict[str, object]]:
    """A first step with nothing kept, and that of another process after it."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"SFT_PLAY_CACHE": folder, "OMP_NUM_THREADS": "1"}
        steps = []
        for lengths in LENGTHS:
            command = [sys.executable, "-m", "benchmarks.compiler_cache", json.dumps(lengths)]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            steps.append(json.loads(done.stdout.splitlines()[-1]))
    return dict(zip(("cold", "warm"), steps, strict=True))


def main() -> int:
    """Runs the benchmark; returns 1 if a second process takes more than a quarter of the first one."""
    if len(sys.argv) > 1:
        print(json.dumps(first_step(tuple(json.loads(sys.argv[1])))))
        return 0
    pairs = [pair() for _ in range(PAIRS)]
    shares = [round(each["warm"]["cpu_seconds"] / each["cold"]["cpu_seconds"], 3) for each in pairs]
    head = {
        "what": "CPU seconds of a first step with compiled layers: nothing kept, and after another process",
        "made_on": made_on(CPU),
        "versions": versions(),
        "warm_by_cold": shares,
    }
    write_result(RESULTS / "compiler_cache_cpu.json", head, {"pairs": pairs})
    console().print(f"a second process takes {max(shares):.0%} of the first one's CPU seconds, at most")
    return int(max(shares) > 0.25)


if __name__ == "__main__":
    sys.exit(main())
