"""How long a run takes from the command to its first optimizer step, next to bare loops.

    python -m benchmarks.start_up   # benchmarks/results/start_up_cpu.json; ten minutes, idle

The work is that of `bench-peers` on GSM8K. This project starts with an empty cache, with nothing in it but
the profile of the CPU, and as the same run again. So the first start measures the profile, the first two
trace the model, and each of the three has its probe.
"""

import os
import shutil
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.measurement_log import RESULTS, made_on, versions, write_result
from benchmarks.peers.__main__ import GSM8K, HELD_OUT, ROWS
from benchmarks.peers.contestants import CONTESTANTS, REFERENCE
from benchmarks.peers.race import run
from benchmarks.peers.work import Work, make_work
from sft_play.ui.console import console

FOLDER = Path(".cache") / "bench-start-up"
PROFILE_ALONE, AGAIN = f"{REFERENCE}, profile known", f"{REFERENCE}, the same run again"
BARE = ("bare loop", "bare loop by length")
FIGURES = ("start_up_seconds", "first_step_seconds")
ROUNDS = 3


def start(name: str, work: Work, folder: Path, **variables: str) -> dict[str, Any]:
    """The line of results of a contestant.

    Raises:
        SystemExit: it failed.
    """
    contestant = next(each for each in CONTESTANTS if each.name == name)
    line = run(contestant, work, folder, judge=False, **variables)
    if line["problem"]:
        raise SystemExit(f"error: {name}: {line['problem']}")
    return line


def starts(work: Work, folder: Path) -> dict[str, dict[str, Any]]:
    """Start -> its line of results; each once, this project with more and more in its cache."""
    place, cache = folder / "run", folder / "cache"
    found = {name: start(name, work, place) for name in (*BARE, REFERENCE)}
    shutil.rmtree(cache, ignore_errors=True)
    shutil.copytree(place / "cache" / "profiles", cache / "profiles")
    for name in (PROFILE_ALONE, AGAIN):
        found[name] = start(REFERENCE, work, place, SFT_PLAY_CACHE=str(cache))
    return found


def medians(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Start -> figure -> median of all rounds, in seconds."""
    return {
        start: {figure: statistics.median(one[start][figure] for one in rounds) for figure in FIGURES}
        for start in rounds[0]
    }


def main() -> None:
    """Measures, prints and writes."""
    load = os.getloadavg()[0]
    folder = FOLDER.absolute()
    data = next((path for path in GSM8K if path.exists()), None)
    if data is None:
        raise SystemExit(f"error: no GSM8K in {' or '.join(map(str, GSM8K))}")
    work = make_work("gsm8k", ROWS, HELD_OUT, data.absolute(), folder / "work")
    rounds = []
    for _ in range(ROUNDS):
        rounds.append(starts(work, folder))
        console().print(medians(rounds[-1:]), highlight=False)
    record = {
        "what": (__doc__ or "").splitlines()[0],
        "made_on": made_on(torch.device("cpu")) | {"load_before": load},
        "versions": versions(),
        "medians": medians(rounds),
    }
    console().print(record["medians"])
    write_result(RESULTS / "start_up_cpu.json", record, {"rounds": rounds})


if __name__ == "__main__":
    main()
