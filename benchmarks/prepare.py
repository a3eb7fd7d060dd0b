"""Memory and speed of preparing data: GSM8K, 10 times and 100 times as many rows.

    python -m benchmarks.prepare                  # peak memory; writes benchmarks/results/prepare_memory.json
    python -m benchmarks.prepare --factors 1,10   # without the largest
    python -m benchmarks.prepare speed            # tokens/s beside datasets, alternating
    python -m benchmarks.prepare speed --workers 2 --factors 10
    python -m benchmarks.prepare long             # rows of up to a million tokens; writes prepare_long.json

Each measurement is a process of its own, and its peak is that of its largest process, workers included, as
the kernel counted it. Rows are made different by a number in the question. The tokenizer is that of
builtin:tiny, trained on the same rows, with its own chat template. Times mean something on an idle machine
only, peaks on any.

Long rows are the same text, joined. Of reading them back, packed, as training and evaluation do, the memory
is that of the process without the pages of the file (RssAnon), which the kernel drops when it needs them.

The speed of `prepare` is that of all it does, from the rows on the disk to tokens on the disk: it also checks
rows, marks what is learned, looks for duplicates, and splits. Beside it are load_dataset and map together,
and map alone, which render and tokenize. A worker has one thread on both sides (TOKENIZERS_PARALLELISM=false,
as `make prepare` sets it). CPU seconds, of all processes, are less disturbed by a busy machine.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.measurement_log import RESULTS, versions
from sft_play.cache import cache_dir
from sft_play.fingerprints import installed_versions
from sft_play.units import MIB

GSM8K = (Path("data/gsm8k/train.jsonl"), Path("../shared/data/gsm8k/train.jsonl"))
FACTORS = "1,10,100"
CHARACTERS_PER_TOKEN = 3  # about, of the tokenizer of builtin:tiny and these rows
MOST_GROWTH = 1.25  # of the peak, from the fewest rows to the most

TOKENIZER = """
import json, sys
from sft_play.builtin.demo import tiny_model
from sft_play.config.inputs import DataInput
inputs = [DataInput("data.train_path", "train", path, "auto") for path in sys.argv[1:]]
print(json.dumps(str(tiny_model(inputs))))
"""
PREPARE = """
import json, os, sys, time
import datasets, transformers.activations  # imports do not count, here and below
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
from sft_play.planning.rows.facts import DataFacts
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


READ = """
import json, sys
from pathlib import Path
from sft_play.config.load import load_config
from sft_play.model.collators import joined_micro_batches
from sft_play.model.load import load_data
from sft_play.parts import Activations, Batch, Kernels, Precision, Rows, Schedule, Sharing
from sft_play.plan import Plan
from sft_play.planning.rows.facts import DataFacts
from sft_play.train.rows import evaluation_rows, training_rows

def own_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

config = load_config(sys.argv[1], sys.argv[2:]).config
data, before = load_data(config, progress=False).rows, own_bytes()
facts = DataFacts.of(data, config)
longest = facts.longest_row
plan = Plan(
    batch=Batch(micro=longest, accumulation=1, effective=longest),
    sharing=Sharing(world_size=1, engine="none"),
    rows=Rows(max_seq_len=longest, packing=True, most_tokens=longest),
    activations=Activations(policy="recompute"),
    precision=Precision(autocast="no", dtype="float32"),
    kernels=Kernels(),
    schedule=Schedule(learning_rate=1e-3, steps_per_epoch=facts.rows, total_steps=facts.rows),
    device="cpu",
)
peak, tokens = own_bytes(), 0
train = training_rows(data.train, plan, seed=0, hidden_size=64, pad_id=0, shares=data.shares)
for batches in (train, evaluation_rows(data.train, plan, pad_id=0)):
    collate = joined_micro_batches(batches.rows, "lengths")
    for batch in batches.dataset:
        tokens += collate([batch])["input_ids"].shape[1]
        peak = max(peak, own_bytes())
print(json.dumps({"own_bytes": peak - before, "tokens": tokens, "longest": longest}))
"""
# tokens of a row -> how many there are, few and more of them
LONG_ROWS = {100_000: (10, 40), 1_000_000: (1, 3)}
LONG_POSITIONS = 2**21
SPLIT = ["model.max_seq_len=32768", "data.overlong=split"]


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


def write_long_rows(source: Path, tokens: int, rows: int, folder: Path) -> Path:
    """Rows of about so many tokens: questions and answers of `source` as one question, and a last answer."""
    file = folder / f"long{tokens}.jsonl"
    texts = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    joined = " ".join(f"{row['question']} {row['answer']}" for row in texts)
    size = CHARACTERS_PER_TOKEN * tokens
    joined *= 1 + 2 * size // len(joined)
    with file.open("w", encoding="utf-8") as out:
        for number in range(rows):
            start = 997 * number % size
            question = f"{number}. {joined[start : start + size]}"
            out.write(json.dumps({"question": question, "answer": texts[number]["answer"]}) + "\n")
    return file


def long_model(source: Path, folder: Path) -> Path:
    """builtin:tiny with more positions than any row has tokens."""
    copy = folder / "model"
    shutil.copytree(tokenizer_folder(source), copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LONG_POSITIONS}))
    return copy


def measure_long(source: Path, place: Path) -> Iterator[dict[str, Any]]:
    """Peak memory of preparing long rows, whole and split, and of reading them back, packed."""
    with tempfile.TemporaryDirectory(dir=place) as name:
        model = long_model(source, Path(name))
        for tokens, counts in LONG_ROWS.items():
            for rows, settings in product(counts, ([], SPLIT)):
                with tempfile.TemporaryDirectory(dir=place) as cache:
                    data = write_long_rows(source, tokens, rows, Path(cache))
                    words = [str(config_file(Path(cache), model, data)), "data.num_workers=1", *settings]
                    words += ["data.supervise=all", "data.val_fraction=0", "train.packing=true"]
                    prepared = run(PREPARE, words, Path(cache))
                    read = run(READ, words, Path(cache))["printed"]
                yield {
                    "row_tokens": tokens,
                    "rows_read": rows,
                    "split": bool(settings),
                    "rows": prepared["printed"]["train"]["rows"],
                    "tokens": read["tokens"],
                    "longest": read["longest"],
                    "prepare_peak_bytes": prepared["peak_bytes"],
                    "read_bytes": read["own_bytes"],
                }


def describe_long(one: dict[str, Any]) -> str:
    """A measurement of long rows for the console."""
    what = f"{one['rows_read']:>4} rows of {one['row_tokens']:>9,} tokens{', split' if one['split'] else ''}"
    return f"{what}: {one['prepare_peak_bytes'] // MIB:,} MiB, {one['read_bytes'] // MIB:,} MiB to read them"


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
    parser.add_argument("what", nargs="?", choices=("memory", "speed", "long"), default="memory")
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
    if args.what == "long":
        long: list[dict[str, Any]] = []
        for one in measure_long(source, place):
            long.append(one)
            sys.stdout.write(describe_long(one) + "\n")
            sys.stdout.flush()
            _write("prepare_long.json", record | {"measured": long})
        return int(any(_grows(few, many) for few, many in pairs_of(long)))
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


def pairs_of(measured: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The measurements of few and of more rows that are alike otherwise."""
    kinds: dict[tuple[int, bool], list[dict[str, Any]]] = {}
    for one in measured:
        kinds.setdefault((one["row_tokens"], one["split"]), []).append(one)
    return [(found[0], found[-1]) for found in kinds.values()]


def _grows(few: dict[str, Any], many: dict[str, Any]) -> bool:
    return many["prepare_peak_bytes"] > MOST_GROWTH * few["prepare_peak_bytes"]


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
