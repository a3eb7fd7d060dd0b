"""How OpenMP's threads should wait: steps with several spin counts, alone and beside another training.

    python -m benchmarks.thread_waiting   # benchmarks/results/thread_waiting_cpu.json; eight minutes, idle

Each measurement is a process of its own, since libgomp reads its settings once. It times forward and backward
passes of the model of `bench-peers` (LoRA, fp32, all cores) on 1 and on 16 joined rows. The other training
runs the same passes with the same setting, without end. The order of the settings rotates.
"""

import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.adapter_step import LENGTHS, adapted_model, batch
from benchmarks.measurement_log import RESULTS, made_on, versions, write_result
from sft_play.launch.environment import WAITING
from sft_play.model.layers.cpu import keep_freed_memory
from sft_play.model.layers.loss_head import token_loss
from sft_play.ui.console import console

SPINS = ("0", "3000", WAITING["GOMP_SPINCOUNT"], "10000", "300000")  # the last one is libgomp's own
REPEATS = {"alone": {1: 20, 16: 6}, "beside": {1: 6, 16: 2}}  # rows -> measured passes
ROUNDS = 2
START_S = 8  # until the other training runs


def seconds(model: Any, rows: int) -> float:
    """Of a forward and a backward pass, on the clock."""
    given = batch(LENGTHS[:rows])
    began = time.perf_counter()
    token_loss(model, given).backward()
    return time.perf_counter() - began


def worker(circumstances: str) -> None:
    """Measures with the setting of this process and prints seconds by rows; `other` only computes."""
    torch.set_num_threads(os.cpu_count() or 1)
    keep_freed_memory()
    model = adapted_model("ours")
    while circumstances == "other":
        seconds(model, 4)
    for rows, count in REPEATS[circumstances].items():
        seconds(model, rows)
        print(rows, statistics.median(seconds(model, rows) for _ in range(count)), flush=True)


def _process(spin: str, circumstances: str) -> "subprocess.Popen[str]":
    words = [sys.executable, "-m", "benchmarks.thread_waiting", circumstances]
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": spin}
    return subprocess.Popen(
        words, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )


@contextmanager
def _other(spin: str) -> Iterator[None]:
    with _process(spin, "other") as process:
        time.sleep(START_S)
        try:
            yield
        finally:
            process.kill()


def measure(spin: str, circumstances: str) -> dict[str, float]:
    """Rows -> median seconds of a pass."""
    said, _ = _process(spin, circumstances).communicate()
    return {rows: float(value) for rows, value in (line.split() for line in said.splitlines())}


def main() -> None:
    """Measures, prints and writes."""
    load, rounds = os.getloadavg()[0], []
    for number in range(ROUNDS):
        for spin in SPINS[number:] + SPINS[:number]:
            found = {"round": number, "spin": spin, "alone": measure(spin, "alone")}
            with _other(spin):
                found["beside"] = measure(spin, "beside")
            rounds.append(found)
            console().print(found, highlight=False)
    table = {
        circumstances: {
            spin: {
                rows: round(
                    statistics.median(one[circumstances][rows] for one in rounds if one["spin"] == spin), 4
                )
                for rows in rounds[0][circumstances]
            }
            for spin in SPINS
        }
        for circumstances in REPEATS
    }
    record = {
        "what": (__doc__ or "").splitlines()[0],
        "made_on": made_on(torch.device("cpu")) | {"load_before": load},
        "versions": versions(),
        "seconds by circumstances, spin count and rows": table,
    }
    console().print(table)
    write_result(RESULTS / "thread_waiting_cpu.json", record, {"rounds": rounds})


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    worker(sys.argv[1]) if sys.argv[1:] else main()
