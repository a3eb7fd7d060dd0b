"""Compares the speed of the same fine-tuning in other toolkits, timed by one stopwatch.

    make bench-peers                      # every contestant, three rounds, two data sets
    make bench-peers ARGS="--quick"       # a few steps each; writes nothing to benchmarks/results

A Llama with 21 million random weights is trained on 256 rows with LoRA in fp32 on the CPU. The stopwatch is
injected into each process (injected/sitecustomize.py). Speed is the number of non-padding tokens divided by
the time from the end of the first optimizer step to the end of the last. Each run is saved when it ends: run
the same command again to continue an interrupted benchmark.
"""

import argparse
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.peers.contestants import CONTESTANTS, REPOSITORY, Contestant
from benchmarks.peers.environments import ENVIRONMENTS, CannotInstall
from benchmarks.peers.race import run
from benchmarks.peers.report import Lines, hardware, summary, table, write_result
from benchmarks.peers.work import Work, make_work

RESULT = Path(__file__).parents[1] / "results" / "peers_cpu.json"
FOLDER = Path(".cache") / "bench-peers"
GSM8K = (Path("data/gsm8k"), Path("../shared/data/gsm8k"))
DATA = ("gsm8k", "tailed")
ROWS, QUICK_ROWS = 256, 12
HELD_OUT, QUICK_HELD_OUT = 128, 2
QUICK = {"rows_per_step": 4, "tokens_per_step": 1024}

console = Console(highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)


def arguments() -> argparse.ArgumentParser:
    """The command-line parser."""
    parser = argparse.ArgumentParser(prog="benchmarks.peers", description=(__doc__ or "").splitlines()[0])
    names = [each.name for each in CONTESTANTS]
    parser.add_argument("--contestants", help=f"some of: {', '.join(names)}")
    parser.add_argument("--data", default=",".join(DATA), help="gsm8k, tailed or both")
    parser.add_argument("--rounds", type=int, help="default 3, quick 1")
    parser.add_argument("--rows", type=int, help=f"default {ROWS}, quick {QUICK_ROWS}")
    parser.add_argument("--gsm8k", type=Path, help="folder with train.jsonl and test.jsonl of GSM8K")
    parser.add_argument(
        "--quick", action="store_true", help="a few steps; the result is printed but not written"
    )
    return parser


def chosen(text: str | None, known: tuple[str, ...]) -> list[str]:
    """Names from a comma-separated list, in the order of `known`.

    Raises:
        SystemExit: a name is unknown.
    """
    asked = [name.strip() for name in text.split(",")] if text else list(known)
    if unknown := [name for name in asked if name not in known]:
        raise SystemExit(f"error: {unknown[0]!r} is not one of: {', '.join(known)}")
    return [name for name in known if name in asked]


def turns(names: list[str], data: list[str], rounds: int) -> Iterator[tuple[int, str, str]]:
    """Round, data set and contestant: each runs once per round, and each round starts with another one."""
    for number in range(rounds):
        first = number * len(names) // rounds
        for each in data:
            for name in names[first:] + names[:first]:
                yield number, each, name


def works(data: list[str], args: argparse.Namespace, folder: Path) -> tuple[dict[str, Work], dict[str, str]]:
    """The work on each data set, and why some data sets are skipped."""
    found, skipped = {}, {}
    gsm8k = args.gsm8k or next((path for path in GSM8K if path.exists()), GSM8K[0])
    held_out, settings = (QUICK_HELD_OUT, QUICK) if args.quick else (HELD_OUT, {})
    for name in data:
        place = (folder / f"{name}-{args.rows}").absolute()
        try:
            found[name] = make_work(name, args.rows, held_out, gsm8k.absolute(), place, **settings)
        except FileNotFoundError as error:
            skipped[name] = f"file not found: {error.filename}"
            console.print(f"{name} is skipped: {skipped[name]}")
    return found, skipped


def versions(contestants: list[Contestant]) -> dict[str, dict[str, str]]:
    """The versions of all packages in each environment that is used and can be created."""
    found = {}
    for name in dict.fromkeys(each.environment for each in contestants):
        environment = ENVIRONMENTS[name]
        console.print(f"environment {name}: {environment.folder}")
        try:
            environment.install()
            found[name] = environment.versions()
        except CannotInstall as error:
            console.print(f"cannot be installed: {error}")
            found[name] = {}
    return found


def commit() -> str | None:
    """The commit of this project, if git knows it."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True
    )
    return done.stdout.strip() or None


def race(
    contestants: list[Contestant], found: dict[str, Work], rounds: int, lines: Lines, folder: Path
) -> None:
    """Runs what has not been run yet; failed runs are repeated."""
    by_name = {each.name: each for each in contestants}
    done = {(line["round"], line["data"], line["contestant"]) for line in lines.read() if not line["problem"]}
    for turn in turns(list(by_name), list(found), rounds):
        if turn in done:
            continue
        number, data, name = turn
        line = run(
            by_name[name],
            found[data],
            (folder / "runs" / name.replace(" ", "-")).absolute(),
            judge=number == 0,
        )
        lines.add({"round": number, "data": data, "contestant": name, **line})
        said = line["problem"] or f"{line['tokens_per_second']:,.0f} tokens/s in {line['steps']} steps"
        console.print(f"round {number} {data:8} {name:22} {said}")


def main(words: list[str] | None = None) -> int:
    """Runs the benchmark, prints and writes the result; returns 1 if a contestant failed."""
    args = arguments().parse_args(words)
    args.rounds = args.rounds or (1 if args.quick else 3)
    args.rows = args.rows or (QUICK_ROWS if args.quick else ROWS)
    names = chosen(args.contestants, tuple(each.name for each in CONTESTANTS))
    contestants = [each for each in CONTESTANTS if each.name in names]
    folder = FOLDER / "quick" if args.quick else FOLDER
    found, skipped = works(chosen(args.data, DATA), args, folder)
    made: dict[str, Any] = {
        "commit": commit(),
        "hardware": hardware(),
        "versions": versions(contestants),
        "work": [work.settings() for work in found.values()],
    }
    everywhere = [made["commit"], made["hardware"]]
    circumstances = {
        (data, each.name): [*everywhere, made["versions"][each.environment], work.settings()]
        for data, work in found.items()
        for each in contestants
    }
    lines = Lines(folder / "lines.jsonl", circumstances)
    race(contestants, found, args.rounds, lines, folder)
    runs = lines.read()
    results = {data: summary(runs, data, names) for data in found}
    for data, entries in results.items():
        console.print(table(entries, data))
    if not args.quick:
        record = {"what": (__doc__ or "").splitlines()[0], **made, "skipped": skipped, "results": results}
        write_result(RESULT, record, runs)
        console.print(f"wrote {RESULT}")
    return 1 if any(entry["problem"] for entries in results.values() for entry in entries) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run in progress is stopped too
    sys.exit(main())
