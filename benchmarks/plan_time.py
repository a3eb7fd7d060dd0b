"""Measures time and memory of planning: a 70B model from its config.json alone, and a small run on this CPU.

    python -m benchmarks.plan_time        # writes benchmarks/results/plan_time.json

Each plan is a process of its own: the first one starts with an empty cache, the second with the cache that
the first one wrote. The small run is that of `bench-peers`: 21 million parameters, rows on the disk; its
first plan also tokenizes the rows and measures the CPU.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.geometries import LLAMA_3_1_70B
from benchmarks.measurement_log import RESULTS, versions
from benchmarks.peers.contestants import sft_play
from benchmarks.peers.work import make_work
from sft_play.units import MIB, format_bytes

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "run_llama70b_qlora.yaml"
MACHINE = ["--gpu", "H100 80GB", "--gpus", "2"]
TARGETS = {"70B": {"first": 10.0}, "21M": {"again": 1.5}}  # seconds
PEAK_BYTES = 2 * 2**30
ROUNDS = 3
ROWS = 256


def large(folder: Path) -> list[str]:
    """The options of the plan of a 70B model on GPUs that need not be here."""
    LLAMA_3_1_70B.save_pretrained(folder)
    return ["--config", str(CONFIG), *MACHINE, f"model.name={folder}"]


def small(folder: Path) -> list[str]:
    """The options of the plan of a small run on this machine."""
    work = make_work("tailed", ROWS, 0, folder, folder)
    sft_play(work, folder, False)
    return ["--config", str(folder / "config.yaml")]


def plan(options: list[str], cache: Path) -> dict[str, Any]:
    """Runs `sft-play plan` and measures the process by the kernel's resource usage."""
    command = [sys.executable, "-m", "sft_play", "plan"]
    began = time.perf_counter()
    process = subprocess.Popen(
        [*command, *options, "--json"],
        env={**os.environ, "SFT_PLAY_CACHE": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    tree = json.loads(process.stdout.read())
    _, _, used = os.wait4(process.pid, 0)
    return {
        "seconds": round(time.perf_counter() - began, 2),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
        "peak_bytes": used.ru_maxrss * 1024,
        "predicted_peak_bytes": tree["memory"]["peak_bytes"],
    }


def rounds(options: list[str]) -> list[dict[str, Any]]:
    """Pairs of plans, the first of each with an empty cache."""
    found = []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as cache:
            found.append({"first": plan(options, Path(cache)), "again": plan(options, Path(cache))})
    return found


def missed(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The targets that the fastest plan of a kind misses."""
    wrong = []
    for name, kinds in TARGETS.items():
        for kind, seconds in kinds.items():
            best = min((one[kind] for one in found[name]), key=lambda one: one["seconds"])
            if best["seconds"] > seconds or best["peak_bytes"] > PEAK_BYTES:
                wrong.append(f"{name}, {kind} plan: {describe(best)} instead of {seconds:g} s")
    return wrong


def main() -> int:
    """Runs the benchmark; returns 1 if a target is missed."""
    load, found = os.getloadavg()[0], {}
    for name, options in (("70B", large), ("21M", small)):
        with tempfile.TemporaryDirectory() as folder:
            found[name] = rounds(options(Path(folder)))
        for one in found[name]:
            runs = (f"{kind}: {describe(run)}" for kind, run in one.items())
            sys.stdout.write(f"{name}   {'   '.join(runs)}\n")
    record = {
        "what": (__doc__ or "").splitlines()[0],
        "made_on": {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load_before": load,
        },
        "versions": versions(),
        "targets": {"seconds": TARGETS, "peak_bytes": PEAK_BYTES},
        "rounds": found,
    }
    path = RESULTS / "plan_time.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    wrong = missed(found)
    sys.stdout.write("".join(f"missed: {line}\n" for line in wrong))
    sys.stdout.write(f"load average before: {load:.1f}; wrote {path}\n")
    return int(bool(wrong))


def describe(run: dict[str, Any]) -> str:
    """A measured plan for the console."""
    peak = format_bytes(run["peak_bytes"] // MIB * MIB)
    return f"{run['seconds']} s ({run['cpu_seconds']} s of CPU time), {peak}"


if __name__ == "__main__":
    sys.exit(main())
