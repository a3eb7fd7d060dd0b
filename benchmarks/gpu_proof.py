"""Everything that has to be measured on a GPU, in one file, what counts most first.

    make gpu-proof                          # on a CUDA machine, ten minutes; again: what is left
    make gpu-proof ARGS="--minutes 30"      # more of it at once
    make gpu-proof ARGS="--device cpu"      # a rehearsal with tiny models, which measures no GPU

A run through the command line, and the same again; the speed of what runs do by default, of what could become
the default and of plain TRL; the memory of steps; output heads; the tests that need a GPU; models divided
among GPUs; plans for random budgets; and the speed two more times. Each figure has a process of its own and
is written at once, so that an end at any time costs one figure. What is done is not repeated, as long as the
hardware and the versions are the same. All of it is put into one file, whose path is printed at the end. A
rehearsal keeps nothing.
"""

import argparse
import json
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_run, gpu_tests, heads, sharded_gpu, sizing_gpu, throughput
from benchmarks.gpu_cases import Target
from benchmarks.measurement_log import RESULTS, made_on, versions, write_result
from benchmarks.throughput_sides import CHOICES, left_out
from sft_play.sizing.step import step_code
from sft_play.ui.console import console

MINUTES = 10.0
LEAST_S = 30  # a part that has less time left waits for the next slice


@dataclass(frozen=True)
class Slice:
    """One run of this program: where it measures, where results are, and until when."""

    device: torch.device
    results: Path
    deadline: float  # time.monotonic()
    made: dict[str, Any]  # what results must have been made with to count

    @classmethod
    def begun(cls, device: torch.device, results: Path, minutes: float) -> "Slice":
        """A slice that begins now."""
        made = {"made_on": made_on(device), "versions": versions()}
        return cls(device, results, time.monotonic() + 60 * minutes, made)

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.deadline - time.monotonic()

    def result(self, name: str) -> dict[str, Any]:
        """A result made with the same hardware and versions; empty if there is none."""
        path = self.results / name
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return found if all(found.get(key) == value for key, value in self.made.items()) else {}


Result = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A part of the proof: a benchmark that goes on where it stopped, its file, and when nothing is left."""

    name: str
    file: str
    main: Callable[[list[str]], int]
    is_done: Callable[[Result], bool]
    share: float = 1.0  # of the time that is left
    words: tuple[str, ...] = ()

    def run(self, now: Slice) -> bool:
        """Whether it went well; an error of its own does not end the proof."""
        minutes = self.share * now.left_s / 60
        words = ["--device", now.device.type, "--minutes", f"{minutes:.2f}", "--results", str(now.results)]
        try:
            return not self.main([*words, *self.words, *(["--quick"] if now.device.type == "cpu" else [])])
        except Exception:
            traceback.print_exc()
            return False


def all_runs_done(result: Result) -> bool:
    """Whether both runs have ended."""
    return len(result.get("runs", ())) == len(gpu_run.RUNS)


def all_cases_done(result: Result) -> bool:
    """Whether bench-sizing-gpu or bench-sharded-gpu has measured everything that it was asked for."""
    cases = result.get("cases", {})
    return bool(cases) and cases["done"] >= cases["planned_for"]


def all_turns_done(rounds: int) -> Callable[[Result], bool]:
    """Whether bench-gpu has timed every side of every run in so many rounds."""

    def are_done(result: Result) -> bool:
        capability = tuple(result.get("made_on", {}).get("compute_capability", ())) or None
        target = Target("cuda", "", capability)
        return len(result.get("turns", ())) >= len(throughput.all_turns(target, rounds))

    return are_done


def all_heads_done(result: Result) -> bool:
    """Whether each case of heads has been timed."""
    return bool(result) and len(result["cases"]) == result["of"]


SPEED = ("throughput_gpu.json", throughput.main)
MEMORY = ("sizing_gpu.json", sizing_gpu.main)
PARTS = (
    Part("run", "run_gpu.json", gpu_run.main, all_runs_done),
    Part("speed", *SPEED, all_turns_done(1), 0.6, ("--rounds", "1")),
    Part("memory", *MEMORY, all_cases_done, 0.5, ("--steps",)),
    Part("heads", "heads_gpu.json", heads.main, all_heads_done, 0.4),
    Part("tests", "gpu_tests.json", gpu_tests.main, lambda found: found.get("finished", False)),
    Part("sharded", "sharded_gpu.json", sharded_gpu.main, all_cases_done),
    Part("plans", *MEMORY, lambda found: bool(found.get("planned_runs")) and all_cases_done(found)),
    Part("speed again", *SPEED, all_turns_done(throughput.ROUNDS)),
)  # fmt: skip


def page(now: Slice) -> str:
    """The summary in Markdown."""
    where, found = now.made["made_on"], {part.name: now.result(part.file) for part in PARTS}
    tests, heads, speed, memory, sharded = (
        found[name] for name in ("tests", "heads", "speed", "memory", "sharded")
    )
    lines = [
        "# Measured on a GPU",
        "",
        f"{where.get('gpu', 'CPU')}, torch {now.made['versions']['torch']}",
        "",
    ]
    lines += [f"- {run_line(run)}" for run in found["run"].get("runs", ())]
    if tests:
        lines.append(
            f"- Tests: {tests['passed']} passed, {len(tests['failed'])} failed {tests['failed'] or ''}"
        )
    for title, result in (("Memory", memory), ("Divided models", sharded)):
        lines += [
            f"- {title}, {kind}: median error {found['median']:.2%}, 95th percentile {found['p95']:.2%}, "
            f"worst {found['worst']:.2%}"
            for kind, found in result.get("errors", {}).items()
        ]
    if memory:
        lines.append(
            f"- Planned runs: {memory['planned_runs']}, out of memory: {memory['planned_runs_out_of_memory']}"
        )
    lines += [f"- Not measured: {problem}" for problem in sharded.get("problems", ())]
    lines += [f"- Output head, {line}" for line in heads.get("found", ())]
    for entry in speed.get("summary", ()):
        ours, ratio = entry["sft-play"]["tokens_per_second"], entry["times_as_fast"]
        if ours and ratio:
            lines.append(f"- Speed, {entry['course']}: {ours:,.0f} tokens/s, {ratio:.2f} times plain TRL")
        for choice in (name for name in CHOICES if (entry.get(name) or {}).get("times_as_fast")):
            lines.append(
                f"- Speed, {entry['course']}, {choice}: {entry[choice]['times_as_fast']:.2f} times ours"
            )
    failed = {row["side"]: row["problem"] for row in speed.get("turns", ()) if row["problem"]}
    capability = tuple(where.get("compute_capability", ())) or None
    for side, why in (failed | left_out(now.device.type, capability)).items():
        lines.append(f"- Speed, not timed: {side}: {why}")
    return "\n".join(lines).rstrip() + "\n"


def run_line(run: Result) -> str:
    """A run of the command line in a sentence."""
    head = f"sft-play train, {run['model']}, {run['run']} run"
    if run["problem"]:
        return f"{head}: {run['problem']}"
    return (
        f"{head}: peak {run['predicted_peak_bytes']:,} bytes predicted, {run['measured_peak_bytes']:,} "
        f"measured; {run['tokens_per_second']:,.0f} tokens/s; {run['command_seconds']:.0f} s in all"
    )


def main(argv: list[str] | None = None) -> int:
    """Runs what is left of the proof for some minutes; returns 1 if a part failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of this slice (default: %(default)g)")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit('no CUDA device found; ARGS="--device cpu" tries the program out with tiny models')
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes are ended here too
    with tempfile.TemporaryDirectory() as folder:
        results = RESULTS if args.device == "cuda" else Path(folder)
        return prove(Slice.begun(torch.device(args.device), results, args.minutes))


def prove(now: Slice) -> int:
    """Runs the parts that are not done in this slice; all results are in one file after each of them."""
    failed = []
    try:
        for part in unfinished(now):
            if now.left_s < LEAST_S:
                break
            console().print(part.name, style="bold")
            if not part.run(now):
                failed.append(part.name)
            gathered(now)
    finally:
        console().print(page(now), markup=False, highlight=False)
        if failed:
            console().print(f"failed: {', '.join(failed)}", style="red")
        say_what_to_do(now, unfinished(now), gathered(now))
    return 1 if failed else 0


def unfinished(now: Slice) -> list[Part]:
    """The parts of which something is left."""
    return [part for part in PARTS if not part.is_done(now.result(part.file))]


def gathered(now: Slice) -> Path:
    """Writes what all parts have found on this hardware into one file; returns its path."""
    gpu, release = now.made["made_on"].get("gpu", "cpu"), now.made["versions"]["torch"].partition("+")[0]
    name = re.sub(r"[^\w.]+", "-", f"{gpu} x{max(1, torch.cuda.device_count())} torch {release}")
    path = now.results / "gpu" / f"{name}.json"
    names = {
        part.file: part.name for part in reversed(PARTS)
    }  # two parts go on with one file: the first names it
    parts = {name: now.result(file) for file, name in names.items()}
    found = {"what": "What make gpu-proof has found", **now.made, "step_code": step_code(), "parts": parts}
    write_result(path, found, {})
    return path


def say_what_to_do(now: Slice, left: Sequence[Part], path: Path) -> None:
    """The last lines: what is left, and what the file is good for."""
    if left:
        names = ", ".join(part.name for part in left)
        console().print(f"Not finished: {names}. The same command again goes on from here.", soft_wrap=True)
    if now.device.type == "cpu":
        console().print("This was a rehearsal: it measured no GPU, and nothing of it is kept.")
        return
    console().print(
        f"\nAll results are in {path}\n"
        "Please send it: add it in a pull request to this project, or attach it to an issue, so that "
        "predictions for this GPU can be compared with it. It names the GPU, its driver, versions and "
        "errors; read it first.",
        soft_wrap=True,
    )


if __name__ == "__main__":
    sys.exit(main())
