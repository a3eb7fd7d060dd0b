"""Measures strong scaling: the same optimizer step on 1, 2, 4 and 8 processes of this machine.

    make bench-scaling NGPU="1 2 4 8"              # writes benchmarks/results/scaling_<device>.json and .png
    make bench-scaling NGPU="1 2" ARGS=--quick     # fewer steps; writes nothing

The effective batch is the same for every number of processes, as in a run: 8 micro-batches per step, divided
among the processes, with gradients all-reduced in the last one by DDP with our settings. Steps with and
without the all-reduce alternate; their difference is its share of the time. On a CPU each process has one
thread. Numbers of processes above the number of GPUs (or cores) are left out.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.table import Table

from sft_play.machine.process import die_with_parent

RESULTS = Path(__file__).resolve().parent / "results"
MODES = ("lora", "full")
MICRO_BATCHES = 8  # per step; divisible by 1, 2, 4 and 8 processes
# A Llama with 13 million weights on a CPU, with 1.2 billion on a GPU; a micro-batch has rows x tokens.
SIZES: dict[str, dict[str, int]] = {
    "cpu": dict(
        hidden=384, inner=1024, layers=6, heads=6, vocabulary=4096, rows=2, tokens=256, warm=1, steps=5
    ),
    "cuda": dict(
        hidden=2048, inner=8192, layers=16, heads=32, vocabulary=32000, rows=4, tokens=1024, warm=3, steps=10
    ),
}


def measure_rank(mode: str, steps: int | None) -> dict[str, Any]:
    """Runs on one rank: measures the seconds of a step with and without the all-reduce of gradients."""
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel
    from transformers import LlamaConfig, LlamaForCausalLM

    from sft_play.config.schema import LoraSettings
    from sft_play.engines.ddp import bucket_mib
    from sft_play.model.adapters.attach import attach_adapter
    from sft_play.model.build import local_device

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    size, world = SIZES[kind], int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device(local_device(kind))
    if kind == "cpu":
        torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=size["hidden"],
        intermediate_size=size["inner"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["heads"],
        vocab_size=size["vocabulary"],
        use_cache=False,
        attn_implementation="sdpa",
    )
    dtype = torch.bfloat16 if kind == "cuda" and mode == "lora" else torch.float32
    base = LlamaForCausalLM(config).to(device, dtype)
    model: Any = attach_adapter(base, LoraSettings()) if mode == "lora" else base
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradient_bytes = sum(parameter.nbytes for parameter in trained)
    if world > 1:
        distributed.init_process_group("nccl" if kind == "cuda" else "gloo")
        model = DistributedDataParallel(
            model,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
            bucket_cap_mb=bucket_mib(gradient_bytes),
        )
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    ids = torch.randint(size["vocabulary"], (size["rows"], size["tokens"]), device=device)

    def step(exchange: bool) -> float:
        if world > 1:
            distributed.barrier()
        began = time.perf_counter()
        count = MICRO_BATCHES // world
        for index in range(count):
            no_exchange = world > 1 and not (exchange and index == count - 1)
            with model.no_sync() if no_exchange else contextlib.nullcontext():
                with torch.autocast(device.type, torch.bfloat16, enabled=kind == "cuda"):
                    loss = model(input_ids=ids, labels=ids).loss / count
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if kind == "cuda":
            torch.cuda.synchronize()
        if world > 1:
            distributed.barrier()
        return time.perf_counter() - began

    for _ in range(size["warm"]):
        step(True)
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(steps or size["steps"]):
        for exchange in (True, False) if world > 1 else (True,):
            times[exchange].append(step(exchange))
    if world > 1:
        distributed.destroy_process_group()
    return {
        "processes": world,
        "tokens_per_step": MICRO_BATCHES * size["rows"] * size["tokens"],
        "exchanged_bytes": gradient_bytes if world > 1 else 0,
        "seconds": times[True],
        "seconds_without_exchange": times[False],
    }


def measure(mode: str, processes: int, device: str, steps: int | None) -> dict[str, Any]:
    """Launches the ranks, and reads the measurements of the first one.

    Args:
        mode: "lora" or "full".
        processes: number of ranks.
        device: "cuda" or "cpu".
        steps: steps of each kind; None for the default of the device.
    """
    from sft_play.launch.accelerate import launch_command, run_launcher
    from sft_play.runlog import RunDir

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        argv = [str(Path(__file__).resolve()), "--rank", str(out), "--mode", mode]
        if steps:
            argv += ["--steps", str(steps)]
        engine = "ddp" if processes > 1 else "none"
        command = launch_command(argv, engine=engine, device=device, processes=processes, cores=processes)
        # The result file counts, not the outcome: accelerate starts a single process without torchrun.
        result = run_launcher(command, RunDir(Path(folder)), timeout_s=600)
        if not out.is_file():
            raise RuntimeError(result.message)
        return json.loads(out.read_text())


def summarise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds tokens per second, speed-up and efficiency against the first row, and the all-reduce's share."""
    speeds = [row["tokens_per_step"] / statistics.median(row["seconds"]) for row in rows]
    summary = []
    for row, speed in zip(rows, speeds, strict=True):
        speed_up = speed / speeds[0] * rows[0]["processes"]
        without = row["seconds_without_exchange"]
        share = 1 - statistics.median(without) / statistics.median(row["seconds"]) if without else 0.0
        found = {"tokens_per_second": speed, "speed_up": speed_up, "efficiency": speed_up / row["processes"]}
        summary.append({**row, **found, "exchange_share": share})
    return summary


def table(mode: str, rows: list[dict[str, Any]]) -> Table:
    """The summary for the console."""
    shown = Table(title=f"{mode}: {rows[0]['tokens_per_step']:,} tokens per step", title_justify="left")
    for head in ("processes", "tokens/s", "speed-up", "efficiency", "gradient all-reduce"):
        shown.add_column(head, justify="right")
    for row in rows:
        shown.add_row(
            str(row["processes"]),
            f"{row['tokens_per_second']:,.0f}",
            f"{row['speed_up']:.2f}x",
            f"{row['efficiency']:.1%}",
            f"{row['exchange_share']:.1%} of a step",
        )
    return shown


def draw(modes: dict[str, list[dict[str, Any]]], device: str, path: Path) -> None:
    """Plots speed-up over processes, with the ideal line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 4), layout="constrained")
    counts = sorted({row["processes"] for rows in modes.values() for row in rows})
    axes.plot(counts, counts, "--", color="grey", label="ideal")
    for mode, rows in modes.items():
        processes = [row["processes"] for row in rows]
        axes.plot(processes, [row["speed_up"] for row in rows], "o-", label=mode)
    axes.set(xlabel="processes", ylabel="speed-up", xticks=counts, title=device)
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Runs the benchmark that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", default="1 2 4 8", help="numbers of processes")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="tuning modes to measure")
    parser.add_argument("--quick", action="store_true", help="one step of each kind; write no result")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        measured = measure_rank(args.mode, args.steps)
        if os.environ.get("RANK", "0") == "0":
            args.rank.write_text(json.dumps(measured))
        return
    from sft_play.machine.gpus import detect
    from sft_play.ui.console import console

    machine = detect()
    device, available = ("cuda", len(machine.gpus)) if machine.gpus else ("cpu", machine.host.cpu_cores)
    name = machine.gpus[0].name if machine.gpus else f"{platform.machine()} CPU, {available} cores"
    asked = sorted(map(int, args.processes.split()))
    counts = [count for count in asked if count <= available and MICRO_BATCHES % count == 0]
    if not counts:
        sys.exit(
            f"error: --processes {args.processes!r}: expected at least one number from 1 to {available} that "
            f"divides {MICRO_BATCHES}"
        )
    steps = 1 if args.quick else None
    modes = {}
    for mode in args.modes:
        modes[mode] = summarise([measure(mode, count, device, steps) for count in counts])
    for mode, rows in modes.items():
        console().print(table(mode, rows))
    if args.quick:
        return
    slug = re.sub(r"\W+", "_", name.lower()).strip("_") if machine.gpus else "cpu"
    versions = {package: version(package) for package in ("torch", "transformers", "accelerate")}
    tree = {
        "device": name,
        "versions": versions,
        "model": SIZES[device],
        "micro_batches": MICRO_BATCHES,
        "modes": modes,
    }
    (RESULTS / f"scaling_{slug}.json").write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    draw(modes, name, RESULTS / f"scaling_{slug}.png")


if __name__ == "__main__":
    if "--rank" in sys.argv:
        die_with_parent()
    main()
