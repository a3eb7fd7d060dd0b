"""Measures what manifest and flushing add to the time of a save, for files as large as those of a real one.

    python -m benchmarks.save_cost            # 1 GiB of weights and state; writes results/save_cost.json

A third of the bytes is weights (safetensors), the rest the two moments of AdamW (torch.save). Each round
writes them anew: plain, then flushed to the disk, then flushed while they are hashed, as a run saves them.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.markdown import RESULTS
from sft_play.files import flush_to_disk
from sft_play.fingerprints import installed_versions
from sft_play.manifest import files_in, hash_files, write_manifest
from sft_play.ui.console import console

TENSORS = 24


def write_files(folder: Path, numbers: int) -> None:
    """Weights with so many fp32 numbers, and their optimizer state."""
    weights = {f"layer{layer}": torch.rand(numbers // TENSORS) for layer in range(TENSORS)}
    state = {name: {"exp_avg": weight, "exp_avg_sq": weight.clone()} for name, weight in weights.items()}
    save_file(weights, folder / "model.safetensors")
    torch.save({"state": state}, folder / "optimizer.pt")


def flush_only(folder: Path) -> None:
    """Waits until the files are on the disk."""
    for name in files_in(folder):
        flush_to_disk(folder / name)


def flush_and_hash(folder: Path) -> None:
    """What a run does once the trainer has written the files."""
    write_manifest(folder, {}, hash_files(folder, files_in(folder), flush=True))


def seconds_of(finish: Callable[[Path], None], numbers: int, where: Path) -> float:
    """Seconds of a save that ends with `finish`."""
    with tempfile.TemporaryDirectory(dir=where) as name:
        began = time.perf_counter()
        write_files(Path(name), numbers)
        finish(Path(name))
        return time.perf_counter() - began


def main() -> None:
    """Prints the median of each kind of save and what it adds, and writes all times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path(), help="folder on the disk to measure")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for save_cost.json")
    args = parser.parse_args()
    numbers = int(args.gib * 2**30 / 12)
    kinds = {"plain": lambda folder: None, "flushed": flush_only, "flushed and hashed": flush_and_hash}
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(args.rounds):
        for name, finish in kinds.items():
            times[name].append(seconds_of(finish, numbers, args.dir))
    base = statistics.median(times["flushed"])
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        console().print(f"{name:>20}  {middle:6.2f} s  {middle / base - 1:+.1%} of a flushed save")
    tree = {
        "device": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "versions": installed_versions(),
        "gib": args.gib,
        "seconds": {name: [round(each, 3) for each in seconds] for name, seconds in times.items()},
        "added_by_hashing": round(statistics.median(times["flushed and hashed"]) / base - 1, 4),
    }
    (args.results / "save_cost.json").write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
