"""Measures CPU seconds and memory of plans, first with nothing kept, then again.

    python -m benchmarks.plan_time              # writes benchmarks/results/plan_time.json
    python -m benchmarks.plan_time 8B max       # only cases with one of these words; writes nothing
    BEFORE=../old ROUNDS=2 python -m benchmarks.plan_time   # beside first plans of another checkout, twice

Each plan is a process of its own: the first one starts with an empty cache, the second with the cache that
the first one wrote. All but the last plan a model from its config alone, on GPUs that need not be here. The
last is the run of `bench-peers` on this CPU: 21 million parameters, rows on the disk; its first plan also
tokenizes the rows and measures the CPU.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.geometries import LLAMA_3_1_70B
from benchmarks.measurement_log import RESULTS, versions
from benchmarks.peers.contestants import sft_play
from benchmarks.peers.work import make_work
from sft_play.units import GIB, MIB, format_bytes

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "run_llama70b_qlora.yaml"
FIRST_CPU_S = {"8B on one GPU": 7, "70B with FSDP2 on four": 10, "all common GPUs": 30, "CONTEXT=max": 15}
AGAIN_CPU_S = 1.5
# Where the aims were set, first plans of commit 1dbe8e5 took these CPU seconds. If $BEFORE is that commit,
# aims grow as much as it takes longer here: the least of both.
BEFORE_CPU_S = {"8B on one GPU": 11.8, "70B with FSDP2 on four": 24.1}
PEAK_BYTES = int(0.7 * GIB)
ROUNDS = int(os.environ.get("ROUNDS", 1))
ROWS = 256


def published(*words: str) -> Callable[[Path], list[str]]:
    """The options of a plan of a model whose config is known."""
    return lambda folder: list(words)


def large(*words: str) -> Callable[[Path], list[str]]:
    """The options of a plan of a 70B model."""

    def options(folder: Path) -> list[str]:
        LLAMA_3_1_70B.save_pretrained(folder)
        return ["--config", str(CONFIG), "--gpu", "H100 80GB", f"model.name={folder}", *words]

    return options


def small(folder: Path) -> list[str]:
    """The options of the plan of a small run on this machine."""
    work = make_work("tailed", ROWS, 0, folder, folder)
    sft_play(work, folder, False)
    return ["--config", str(folder / "config.yaml")]


CASES: dict[str, Callable[[Path], list[str]]] = {
    "8B on one GPU": published("--model", "qwen3-8b", "--gpu", "RTX 4090", "--gpus", "1"),
    "70B with FSDP2 on four": large("--gpus", "4", "parallel.engine=fsdp2"),
    "70B with QLoRA on two": large("--gpus", "2"),
    "all common GPUs": published("--model", "qwen3-8b"),
    "CONTEXT=max": published("--model", "llama-3.1-8b", "--gpu", "H100 80GB", "--context", "max"),
    "21M on this CPU": small,
}


# a process says its own peak: the kernel's figure for a child begins with what its parent had
PLAN = """\
import sys
from sft_play.cli import main
code = main(["plan", *sys.argv[1:]])
with open("/proc/self/status") as status:
    sys.stderr.write(next(line for line in status if line.startswith("VmHWM")))
sys.exit(code)
"""


def plan(options: list[str], cache: Path, code: Path = ROOT) -> dict[str, Any]:
    """Runs `sft-play plan` of a checkout in a process of its own, and measures it."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", PLAN, *options],
        cwd=code,  # which is where Python looks first
        env={**os.environ, "SFT_PLAY_CACHE": str(cache)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    assert status == 0, said
    return {
        "seconds": round(time.perf_counter() - began, 2),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
        "peak_bytes": int(said.split()[-2]) * 1024,
    }


def rounds(options: list[str]) -> list[dict[str, Any]]:
    """Pairs of plans, the first of each with an empty cache; before them, one of the code in $BEFORE."""
    found = []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as other:
            before = os.environ.get("BEFORE")
            found.append({"before": plan(options, Path(other), Path(before).resolve())} if before else {})
            found[-1] |= {when: plan(options, Path(cache)) for when in ("first", "again")}
    return found


def best_of(several: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The plan of this kind that took the least CPU time."""
    return min((one[kind] for one in several), key=lambda one: one["cpu_seconds"])


def slowness(found: dict[str, list[dict[str, Any]]]) -> float:
    """How many times as long as where the aims were set plans take on this machine now; 1 if unknown."""
    known = [name for name in BEFORE_CPU_S if "before" in found.get(name, [{}])[0]]
    times = [best_of(found[name], "before")["cpu_seconds"] / BEFORE_CPU_S[name] for name in known]
    return max(1.0, min(times, default=1.0))


def missed(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The aims that the best plan of a case misses."""
    wrong, slower = [], slowness(found)
    for name, several in found.items():
        for kind, seconds in (("first", FIRST_CPU_S.get(name)), ("again", AGAIN_CPU_S)):
            best = best_of(several, kind)
            too_much = name in FIRST_CPU_S and best["peak_bytes"] > PEAK_BYTES
            if (seconds and best["cpu_seconds"] > seconds * slower) or too_much:
                aim = f"{seconds * slower:.1f} s of CPU time, " if seconds else ""
                wrong.append(
                    f"{name}, {kind} plan: {describe(best)} instead of {aim}{format_bytes(PEAK_BYTES)}"
                )
    return wrong


def main(words: Sequence[str]) -> int:
    """Runs the benchmark; returns 1 if an aim is missed."""
    load, found = os.getloadavg()[0], dict[str, list[dict[str, Any]]]()
    for name, options in CASES.items():
        if words and not any(word in name for word in words):
            continue
        with tempfile.TemporaryDirectory() as folder:
            found[name] = rounds(options(Path(folder)))
        for one in found[name]:
            runs = (f"{kind}: {describe(run)}" for kind, run in one.items())
            sys.stdout.write(f"{name}   {'   '.join(runs)}\n")
            sys.stdout.flush()
        if not words:
            write(found, load)  # what is interrupted keeps the cases before
    wrong = missed(found)
    sys.stdout.write("".join(f"missed: {line}\n" for line in wrong))
    sys.stdout.write(f"load average before: {load:.1f}; aims times {slowness(found):.2f}\n")
    return int(bool(wrong))


def write(found: dict[str, list[dict[str, Any]]], load: float) -> None:
    """Writes what was measured, on what, and the aims."""
    record = {
        "what": (__doc__ or "").splitlines()[0],
        "made_on": {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load_before": load,
        },
        "versions": versions(),
        "aims": {
            "first_cpu_seconds": FIRST_CPU_S,
            "again_cpu_seconds": AGAIN_CPU_S,
            "peak_bytes": PEAK_BYTES,
            "set_where_before_took": BEFORE_CPU_S,
        },
        "rounds": found,
    }
    (RESULTS / "plan_time.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def describe(run: dict[str, Any]) -> str:
    """A measured plan for the console."""
    peak = format_bytes(run["peak_bytes"] // MIB * MIB)
    return f"{run['cpu_seconds']} s of CPU time ({run['seconds']} s), {peak}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
