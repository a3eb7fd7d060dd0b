"""Memory and speed of preparing data: GSM8K, 10 times and 100 times as many rows.

    python -m benchmarks.prepare                  # peak memory; writes benchmarks/results/prepare_memory.json
    python -m benchmarks.prepare --factors 1,10   # without the largest
    python -m benchmarks.prepare speed            # tokens/s beside datasets, alternating
    python -m benchmarks.prepare speed --workers 2 --factors 10

Each measurement is a process of its own, and its peak is that of its largest process, workers included, as
the kernel counted it. Rows are made different by a number in the question. The tokenizer is that of
builtin:tiny, trained on the same rows, with its own chat template. Times mean something on an idle machine
only, peaks on any.

The speed of `prepare` is that of all it does, from the rows on the disk to tokens on the disk: it also checks
rows, marks what is learned, looks for duplicates, and splits. Beside it are load_dataset and map together,
and map alone, which render and tokenize. A worker has one thread on both sides (TOKENIZERS_PARALLELISM=false,
as `make prepare` sets it). CPU seconds, of all processes, are less disturbed by a busy machine.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.measurement_log import RESULTS, versions
from sft_play.cache import cache_dir
from sft_play.fingerprints import installed_versions
from sft_play.units import MIB

GSM8K = (Path("data/gsm8k/train.jsonl"), Path("../shared/data/gsm8k/train.jsonl"))
FACTORS = "1,10,100"
MOST_GROWTH = 1.25  # of the peak, from the fewest rows to the most

TOKENIZER = """
import json, sys
from sft_play.builtin.demo import tiny_model
print(json.dumps(str(tiny_model(sys.argv[1:]))))
"""
PREPARE = """
import json, os, sys, time
import datasets  # imports do not count, here and below
from sft_play.config.load import load_config
from sft_play.model.load import load_data
config = load_config(sys.argv[1], sys.argv[2:]).config
began, used = time.perf_counter(), sum(os.times()[:4])
stats = load_data(config, progress=False).rows.stats
ended, cpu_seconds = time.perf_counter(), sum(os.times()[:4]) - used
print(json.dumps(stats | {"seconds": ended - began, "cpu_seconds": cpu_seconds}))
"""
FACTS = """
import sys
from sft_play.config.load import load_config
from sft_play.model.load import load_data
from sft_play.planning.facts import DataFacts
config = load_config(sys.argv[1], sys.argv[2:]).config
print(DataFacts.of(load_data(config, progress=False).rows, config).rows)
"""
MAP = """
import json, os, sys, time
from datasets import load_dataset
from transformers import AutoTokenizer
model, data, workers = sys.argv[1:]
began, used = time.perf_counter(), sum(os.times()[:4])
tokenizer = AutoTokenizer.from_pretrained(model)
rows = load_dataset("json", data_files=data, split="train")

def encode(batch):
    pairs = zip(batch["question"], batch["answer"])
    talks = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in pairs]
    texts = tokenizer.apply_chat_template(talks, tokenize=False)
    return tokenizer(texts, add_special_tokens=False)

loaded = time.perf_counter()
processes = int(workers) if int(workers) > 1 else None  # 1 would start one, too
done = rows.map(encode, batched=True, num_proc=processes, remove_columns=rows.column_names)
ended, cpu_seconds = time.perf_counter(), sum(os.times()[:4]) - used
tokens = sum(map(len, done["input_ids"]))
seconds = {"seconds": ended - began, "map_seconds": ended - loaded, "cpu_seconds": cpu_seconds}
print(json.dumps(seconds | {"tokens": tokens}))
"""


def write_rows(source: Path, factor: int, folder: Path) -> Path:
    """The rows of `source`, `factor` times, no two alike."""
    file = folder / f"rows{factor}.jsonl"
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    with file.open("w", encoding="utf-8") as out:
        for copy in range(factor):
            for row in rows:
                question = f"{copy}. {row['question']}" if copy else row["question"]
                out.write(json.dumps({**row, "question": question}) + "\n")
    return file


def run(code: str, words: list[str], cache: Path) -> dict[str, Any]:
    """Runs Python code in a process of its own; what it printed last, and the peak of its largest process."""
    environment = {
        **os.environ,
        "SFT_PLAY_CACHE": str(cache),
        "HF_DATASETS_CACHE": str(cache / "hf"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-c", code, *words]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"the measured process ended with {process.returncode}")
    return {"printed": json.loads(printed.splitlines()[-1]), "peak_bytes": used.ru_maxrss * 1024}


def config_file(folder: Path, model: Path, data: Path) -> Path:
    """A config that trains `model` on `data`."""
    file = folder / f"{data.stem}.yaml"
    file.write_text(f"model: {{name: {model}}}\ndata: {{train_path: {data}}}\n", encoding="utf-8")
    return file


def tokenizer_folder(data: Path) -> Path:
    """builtin:tiny for these rows, made elsewhere: a process begins with the memory of ours as its peak."""
    return Path(run(TOKENIZER, [str(data)], cache_dir())["printed"])


def measure_memory(source: Path, factors: list[int], place: Path) -> Iterator[dict[str, Any]]:
    """Peak memory of preparing the rows, and of reading them back to plan a run, for each factor."""
    model = tokenizer_folder(source)
    for factor in factors:
        with tempfile.TemporaryDirectory(dir=place) as name:
            folder = Path(name)
            data = write_rows(source, factor, folder)
            config = str(config_file(folder, model, data))
            prepared = run(PREPARE, [config], folder)
            planned = run(FACTS, [config], folder)
            stats = prepared["printed"]
            yield {
                "factor": factor,
                "file_bytes": data.stat().st_size,
                "rows": stats["train"]["rows"] + stats["val"]["rows"],
                "tokens": stats["train"]["tokens"] + stats["val"]["tokens"],
                "prepare_peak_bytes": prepared["peak_bytes"],
                "facts_peak_bytes": planned["peak_bytes"],
            }


def describe(one: dict[str, Any]) -> str:
    """A measurement for the console."""
    peaks = f"{one['prepare_peak_bytes'] // MIB:,} MiB, {one['facts_peak_bytes'] // MIB:,} MiB to plan"
    size = f"{one['rows']:>9,} rows  {one['file_bytes'] // MIB:>5,} MiB of rows"
    return f"{one['factor']:>4} x  {size}: {peaks}"


def measure_speed(source: Path, factor: int, rounds: int, workers: int, place: Path) -> dict[str, Any]:
    """Seconds of `prepare` and of datasets in turn, each from an empty cache."""
    model = tokenizer_folder(source)
    seconds: dict[str, list[float]] = {"prepare": [], "load_dataset and map": [], "map alone": []}
    cpu_seconds: dict[str, list[float]] = {"prepare": [], "load_dataset and map": []}
    tokens: dict[str, int] = {}
    with tempfile.TemporaryDirectory(dir=place) as name:
        data = write_rows(source, factor, Path(name))
        config = str(config_file(Path(name), model, data))
        for _ in range(rounds):
            with tempfile.TemporaryDirectory(dir=place) as cache:
                ours = run(PREPARE, [config, f"data.num_workers={workers}"], Path(cache))["printed"]
                theirs = run(MAP, [str(model), str(data), str(workers)], Path(cache))["printed"]
            seconds["prepare"].append(round(ours["seconds"], 2))
            seconds["load_dataset and map"].append(round(theirs["seconds"], 2))
            seconds["map alone"].append(round(theirs["map_seconds"], 2))
            cpu_seconds["prepare"].append(round(ours["cpu_seconds"], 2))
            cpu_seconds["load_dataset and map"].append(round(theirs["cpu_seconds"], 2))
            own = sum(ours[split]["tokens"] for split in ("train", "val"))
            tokens = dict.fromkeys(seconds, theirs["tokens"]) | {"prepare": own}
    sizes = {"workers": workers, "factor": factor, "tokens": tokens}
    return sizes | {"seconds": seconds, "cpu_seconds": cpu_seconds}


def main() -> int:
    """Runs one of the two; returns 1 if memory grows by more than MOST_GROWTH."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("memory", "speed"), default="memory")
    parser.add_argument("--rows", type=Path, help="train.jsonl of GSM8K")
    parser.add_argument("--factors", default=FACTORS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    source = (args.rows or next((path for path in GSM8K if path.exists()), GSM8K[0])).absolute()
    place = cache_dir()
    place.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    cpu = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load_before": load}
    factors = [int(factor) for factor in args.factors.split(",")]
    software = versions() | installed_versions(("tokenizers", "datasets", "pyarrow"))
    record = {"what": (__doc__ or "").splitlines()[0], "made_on": cpu, "versions": software}
    if args.what == "speed":
        found = measure_speed(source, min(factors), args.rounds, args.workers, place)
        for name, times in found["cpu_seconds"].items():
            sys.stdout.write(f"{name:>20}: {statistics.median(times):.2f} s of CPU time, all processes\n")
        for name, times in found["seconds"].items():
            rate = found["tokens"][name] / statistics.median(times)
            sys.stdout.write(f"{name:>20}: {statistics.median(times):.2f} s, {rate:,.0f} tokens/s\n")
        _write("prepare_speed.json", record | found)
        return 0
    measured: list[dict[str, Any]] = []
    for one in measure_memory(source, factors, place):
        measured.append(one)
        sys.stdout.write(describe(one) + "\n")
        growth = bytes_per_row(measured)
        _write("prepare_memory.json", record | {"bytes_per_row": round(growth, 1), "measured": measured})
    sys.stdout.write(f"memory of preparing grows by {growth:.0f} bytes a row\n")
    peaks = [one["prepare_peak_bytes"] for one in measured]
    return int(peaks[-1] > MOST_GROWTH * peaks[0])


def bytes_per_row(measured: list[dict[str, Any]]) -> float:
    """By how much the peak of preparing grows, from the fewest to the most rows."""
    first, last = measured[0], measured[-1]
    more = last["prepare_peak_bytes"] - first["prepare_peak_bytes"]
    return more / max(last["rows"] - first["rows"], 1)


def _write(name: str, record: dict[str, Any]) -> None:
    path = RESULTS / name
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"load average before: {record['made_on']['load_before']:.1f}; wrote {path}\n")


if __name__ == "__main__":
    sys.exit(main())
