"""Memory and speed of preparing data: GSM8K, 10 times and 100 times as many rows.

    python -m benchmarks.prepare                  # peak memory; writes benchmarks/results/prepare_memory.json
    python -m benchmarks.prepare --factors 1,10   # without the largest
    python -m benchmarks.prepare speed            # tokens/s beside datasets.map alone, alternating

Each measurement is a process of its own, and its peak is that of its largest process, workers included, as
the kernel counted it. Rows are made different by a number in the question. The tokenizer is that of
builtin:tiny, trained on the same rows. Times mean something on an idle machine only, peaks on any.
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
from sft_play.runlog import cache_dir
from sft_play.units import MIB

GSM8K = (Path("data/gsm8k/train.jsonl"), Path("../shared/data/gsm8k/train.jsonl"))
FACTORS = "1,10,100"
MOST_GROWTH = 1.25  # of the peak, from the fewest rows to the most

PREPARE = """
import json, sys
from sft_play.config.load import load_config
from sft_play.model.data import load_data
config = load_config(sys.argv[1], sys.argv[2:]).config
print(json.dumps(load_data(config, progress=False).rows.stats))
"""
FACTS = """
import sys
from sft_play.config.load import load_config
from sft_play.model.data import load_data
from sft_play.planning.facts import DataFacts
config = load_config(sys.argv[1], sys.argv[2:]).config
print(DataFacts.of(load_data(config, progress=False).rows, config).rows)
"""
MAP = """
import json, sys, time
from datasets import load_dataset
from transformers import AutoTokenizer
model, data, workers = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(model)
tokenizer.chat_template = TEMPLATE
rows = load_dataset("json", data_files=data, split="train")

def encode(batch):
    pairs = zip(batch["question"], batch["answer"])
    talks = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in pairs]
    texts = tokenizer.apply_chat_template(talks, tokenize=False)
    return tokenizer(texts, add_special_tokens=False)

began = time.perf_counter()
options = {"batched": True, "num_proc": int(workers), "load_from_cache_file": False}
done = rows.map(encode, remove_columns=rows.column_names, **options)
seconds = time.perf_counter() - began
print(json.dumps({"seconds": seconds, "tokens": sum(map(len, done["input_ids"]))}))
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
    environment = {**os.environ, "SFT_PLAY_CACHE": str(cache), "HF_DATASETS_CACHE": str(cache / "hf")}
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
    """builtin:tiny for these rows."""
    from sft_play.builtin.demo import tiny_model

    return tiny_model([str(data)])


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
    """Seconds of `prepare` and of datasets.map in turn, each from an empty cache."""
    template = (Path(__file__).parents[1] / "sft_play/data/templates/plain.jinja").read_text(encoding="utf-8")
    model = tokenizer_folder(source)
    seconds: dict[str, list[float]] = {"prepare": [], "datasets.map": []}
    tokens: dict[str, int] = {}
    with tempfile.TemporaryDirectory(dir=place) as name:
        data = write_rows(source, factor, Path(name))
        config = str(config_file(Path(name), model, data))
        for _ in range(rounds):
            with tempfile.TemporaryDirectory(dir=place) as cache:
                ours = run(PREPARE, [config, f"data.num_workers={workers}"], Path(cache))["printed"]
                code = f"TEMPLATE = {template!r}\n{MAP}"
                theirs = run(code, [str(model), str(data), str(workers)], Path(cache))["printed"]
            seconds["prepare"].append(ours["seconds"])
            seconds["datasets.map"].append(round(theirs["seconds"], 2))
            own = sum(ours[split]["tokens"] for split in ("train", "val"))
            tokens = {"prepare": own, "datasets.map": theirs["tokens"]}
    return {"workers": workers, "factor": factor, "seconds": seconds, "tokens": tokens}


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
    record = {"what": (__doc__ or "").splitlines()[0], "made_on": cpu, "versions": versions()}
    if args.what == "speed":
        found = measure_speed(source, min(factors), args.rounds, args.workers, place)
        for name, times in found["seconds"].items():
            rate = found["tokens"][name] / statistics.median(times)
            sys.stdout.write(f"{name:>12}: {statistics.median(times):.2f} s, {rate:,.0f} tokens/s\n")
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
