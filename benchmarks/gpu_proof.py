"""Everything that has to be measured on a GPU, in twenty minutes and one file: tests, memory, speed.

    make gpu-proof                          # on a CUDA machine; run it again to measure what is left
    make gpu-proof ARGS="--minutes 9"       # in less time
    make gpu-proof ARGS="--device cpu"      # the same program with tiny models, for trying it out

First the tests that need a GPU, then output heads alone (benchmarks/heads.py) and bench-gpu, whose first
minutes time every kernel that could become a default. bench-sizing-gpu and bench-sharded-gpu share with it
the time that is left. What is done is kept in benchmarks/results and not repeated, as long as the hardware
and the versions are the same. All of it is put into one file, whose path is printed at the end: for those
who have no such GPU. With --device cpu nothing is kept.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.measurement_log import RESULTS, made_on, versions, write_result
from benchmarks.throughput import COURSES, ROUNDS
from benchmarks.throughput_sides import CHOICES, left_out, sides
from sft_play.sizing.step import step_code
from sft_play.ui.console import console

MINUTES = 20.0
LEAST_S = 60  # a part that has less time left waits for the next slice
TESTS = "gpu_tests.json"


@dataclass(frozen=True)
class Slice:
    """One run of this program: where it measures, and until when."""

    device: torch.device
    results: Path
    deadline: float  # time.monotonic()

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.deadline - time.monotonic()

    @property
    def made(self) -> dict[str, Any]:
        """What results must have been made with to count."""
        return {"made_on": made_on(self.device), "versions": versions()}

    def result(self, name: str) -> dict[str, Any]:
        """A result made with the same hardware and versions; empty if there is none."""
        path = self.results / name
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return found if all(found.get(key) == value for key, value in self.made.items()) else {}


@dataclass(frozen=True)
class Part:
    """A part of the proof: its result file, how it is run, and whether nothing of it is left."""

    name: str
    file: str
    run: Callable[[Slice], int]
    is_done: Callable[[dict[str, Any]], bool]
    continues: bool = True  # where the last slice stopped; otherwise it takes as long as it takes


def run_tests(now: Slice) -> int:
    """Runs the tests of tests/gpu that are meant for the device; returns pytest's exit code."""
    on_gpu = now.device.type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = ["-m", "pytest", "tests/gpu", "-m", "gpu" if on_gpu else "not gpu", f"--junitxml={report}"]
        try:
            code = subprocess.run([sys.executable, *words], timeout=now.left_s).returncode
        except subprocess.TimeoutExpired:
            return 1
        record = {"what": "Tests of tests/gpu", **now.made, **outcome(report)}
    write_result(now.results / TESTS, record, {})
    return code


def outcome(report: Path) -> dict[str, Any]:
    """Counts and names from a report in JUnit's format."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed, skipped = _names(cases, "failure", "error"), _names(cases, "skipped")
    return {"passed": len(cases) - len(failed) - len(skipped), "failed": failed, "skipped": skipped}


def _names(cases: list[ElementTree.Element], *tags: str) -> list[str | None]:
    """Names of the test cases that hold one of these elements."""
    return [case.get("name") for case in cases if any(case.find(tag) is not None for tag in tags)]


def run_benchmark(module: str) -> Callable[[Slice], int]:
    """A function that runs one of the benchmarks for the time that is left; it continues where it stopped."""

    def run(now: Slice) -> int:
        words = ["-m", module, "--device", now.device.type, "--minutes", f"{now.left_s / 60:.2f}"]
        quick = (
            ["--quick", "--lines", str(now.results / f"{module}.jsonl")] if now.device.type == "cpu" else []
        )
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        return subprocess.run([sys.executable, *words, *quick], env=environment).returncode

    return run


def all_cases_done(result: dict[str, Any]) -> bool:
    """Whether bench-sizing-gpu has measured everything."""
    cases = result.get("cases", {})
    return bool(cases) and cases["done"] == cases["planned_for"]


def all_turns_done(result: dict[str, Any]) -> bool:
    """Whether bench-gpu has timed every side of every run in every round."""
    capability = tuple(result.get("made_on", {}).get("compute_capability", ())) or None
    turns = ROUNDS * sum(len(sides("cuda", course.mode, capability)) for course in COURSES)
    return len(result.get("turns", ())) >= turns


PARTS = (
    Part("tests", TESTS, run_tests, bool, continues=False),
    Part("heads", "heads_gpu.json", run_benchmark("benchmarks.heads"), bool, continues=False),
    Part("speed", "throughput_gpu.json", run_benchmark("benchmarks.throughput"), all_turns_done),
    Part("memory", "sizing_gpu.json", run_benchmark("benchmarks.sizing_gpu"), all_cases_done),
    Part("sharded", "sharded_gpu.json", run_benchmark("benchmarks.sharded_gpu"), all_cases_done),
)


def page(now: Slice) -> str:
    """The summary in Markdown."""
    where = now.made["made_on"]
    tests, heads, speed, memory, sharded = (now.result(part.file) for part in PARTS)
    lines = [
        "# Measured on a GPU",
        "",
        f"{where.get('gpu', 'CPU')}, torch {now.made['versions']['torch']}",
        "",
    ]
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
    with tempfile.TemporaryDirectory() as folder:
        results = RESULTS if args.device == "cuda" else Path(folder)
        return prove(Slice(torch.device(args.device), results, time.monotonic() + 60 * args.minutes))


def prove(now: Slice) -> int:
    """Runs the parts that are not done in this slice, and puts all results into one file."""
    failed, waiting = [], unfinished(now)
    while waiting and now.left_s >= LEAST_S:
        part = waiting[0]
        console().print(part.name, style="bold")
        own_s = now.left_s / (len(waiting) if part.continues else 1)
        if part.run(replace(now, deadline=time.monotonic() + own_s)):
            failed.append(part.name)
        waiting = waiting[1:]
    console().print(page(now), markup=False, highlight=False)
    if failed:
        console().print(f"failed: {', '.join(failed)}", style="red")
    if now.device.type == "cuda":
        say_what_to_do(unfinished(now), gathered(now))
    return 1 if failed else 0


def unfinished(now: Slice) -> list[Part]:
    """The parts of which something is left."""
    return [part for part in PARTS if not part.is_done(now.result(part.file))]


def gathered(now: Slice) -> Path:
    """Writes what all parts have found on this hardware into one file; returns its path."""
    where = now.made["made_on"]
    name = re.sub(r"\W+", "-", f"{where.get('gpu', 'cpu')} x{max(1, torch.cuda.device_count())}")
    path = now.results / "gpu" / f"{name}.json"
    parts = {part.name: now.result(part.file) for part in PARTS}
    found = {"what": "What make gpu-proof has found", **now.made, "step_code": step_code(), "parts": parts}
    write_result(path, found, {})
    return path


def say_what_to_do(left: Sequence[Part], path: Path) -> None:
    """The last lines: what is left, and what the file is good for."""
    if left:
        names = ", ".join(part.name for part in left)
        console().print(f"not finished: {names}; run the same command again to go on")
    console().print(
        f"\nAll results are in {path}. Please attach it to an issue of this project, so that predictions for "
        "this GPU can be compared with it. It names the GPU, its driver, versions and errors; read it first.",
        soft_wrap=True,
    )


if __name__ == "__main__":
    sys.exit(main())
