"""Runs `sft-play train` on a GPU: LoRA of a large model with random weights, and the same once more.

    python -m benchmarks.gpu_run                          # on a CUDA machine, two to three minutes
    python -m benchmarks.gpu_run --device cpu --quick     # the same program with a tiny model

The first run measures the GPU, the second one knows it; their cache has nothing else in it. Their summaries
hold what was predicted and what was measured. The first form writes benchmarks/results/run_gpu.json.
"""

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.alone import ended, figure
from benchmarks.gpu_cases import architecture
from benchmarks.measurement_log import MeasurementLog, write_result
from benchmarks.sizing_gpu import arguments, local_device, results_of
from sft_play.builtin.models import byte_level_tokenizer
from sft_play.builtin.world import order_rows
from sft_play.runlog import RunDir, read_json
from sft_play.ui.console import console
from sft_play.units import GIB

PLACE = Path(".cache") / "gpu-run"  # of the model and the runs, until both are done
# Bytes of a GPU from which a model is trained on it: its weights take less than half of them.
MODELS = ((40 * GIB, "Llama-3.1-8B"), (14 * GIB, "Llama-3.2-3B"), (0, "Qwen2.5-0.5B"))
QUICK = "small-llama"
RUNS = ("first", "again")
ROWS, VOCABULARY, POSITIONS = 800, 4000, 8192
SETTINGS = {
    "model.max_seq_len": 512, "train.max_steps": 12, "train.logging_steps": 1,
    "train.effective_batch_size": 32, "eval.generate": "false", "train.report_to": "[]",
}  # fmt: skip
# Of the summary: what a prediction can be compared with, and nothing that names a person's files.
KEPT = (
    "status", "device", "effective_batch_size", "micro_batch_size", "micro_batch_tokens", "padding_free",
    "gradient_accumulation_steps", "optimizer_steps", "supervised_tokens", "tokens_per_second",
    "training_seconds", "mfu", "data_wait", "padding_share", "probe", "train_loss", "eval", "start_seconds",
)  # fmt: skip


def model_for(total_bytes: int) -> str:
    """The model that is trained on a GPU of this size."""
    return next(model for least, model in MODELS if total_bytes >= least)


def make_model(model: str, folder: str, device_type: str) -> dict[str, Any]:
    """Writes a model with random weights, a tokenizer and rows; 8B took 25 s and 15 GiB on an H200."""
    place = Path(folder)
    rows = "".join(f"{json.dumps(row)}\n" for row in order_rows(0, {"train": ROWS})["train"])
    with torch.device(device_type):
        weights = AutoModelForCausalLM.from_config(architecture(model), dtype=torch.bfloat16)
    weights.save_pretrained(place / "model", max_shard_size="5GB")
    byte_level_tokenizer([rows], VOCABULARY, POSITIONS).save_pretrained(place / "model")
    (place / "train.jsonl").write_text(rows, encoding="utf-8")  # the last file: with it, all are there
    return {}


def train(name: str, place: Path, device_type: str, deadline: float) -> dict[str, Any] | None:
    """What the summary of a run says, and the seconds of the command; None if it was too late for it."""
    settings = SETTINGS | {
        "model.name": place / "model", "data.train_path": place / "train.jsonl",
        "output.dir": place, "output.name": name,
    }  # fmt: skip
    words = ["-m", "sft_play", "train", "--config", "configs/run_lora.yaml"]
    variables = {"SFT_PLAY_CACHE": str(place / "cache"), "HF_HUB_OFFLINE": "1"}
    if device_type == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    began, log = time.monotonic(), place / f"{name}.txt"
    with log.open("w", encoding="utf-8") as output:
        options = [f"{key}={value}" for key, value in settings.items()]
        code = ended([sys.executable, *words, *options], deadline - began, output, **variables)
    seconds = round(time.monotonic() - began, 2)
    if code:
        said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
        return {"problem": f"exit code {code}: {' '.join(said)}"}
    if code is None:
        return None
    summary = read_json(RunDir(place / name).summary)
    kept = (key for key in summary if key in KEPT or key.startswith(("predicted_", "measured_")))
    return {"problem": None, "command_seconds": seconds, **{key: summary[key] for key in kept}}


def measure(lines: MeasurementLog, device_type: str, model: str, place: Path, deadline: float) -> None:
    """Logs the runs that are not in the log until the time is up, `deadline` of time.monotonic()."""
    done = {line["run"] for line in lines.read()}
    for name in (each for each in RUNS if each not in done):
        made: dict[str, Any] | None = {}
        if not (place / "train.jsonl").exists():
            place.mkdir(parents=True, exist_ok=True)
            made = figure("benchmarks.gpu_run:make_model", model, str(place), device_type, deadline=deadline)
        found = made or (train(name, place, device_type, deadline) if made is not None else None)
        if found is None:
            return
        lines.add({"run": name, "model": model, **found})
        said = found["problem"] or (
            f"{found['command_seconds']} s, of which {found['training_seconds']:.1f} s are training"
        )
        console().print(f"sft-play train, {name} run: {said}", markup=False, highlight=False)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if a run failed."""
    began = time.monotonic()
    args = arguments(__doc__, 5.0).parse_args(argv)
    device, results = local_device(args), results_of(args)
    lines = MeasurementLog(results / f"run_{device.type}.lines.jsonl", device)
    model = QUICK if args.quick else model_for(lines.made["made_on"]["total_bytes"])
    place = results.absolute() / "run" if args.quick else PLACE.absolute()
    measure(lines, device.type, model, place, began + 60 * args.minutes)
    rows = lines.read()
    write_result(
        results / "run_gpu.json", {"what": (__doc__ or "").splitlines()[0], **lines.made}, {"runs": rows}
    )
    if len(rows) == len(RUNS):
        shutil.rmtree(place, ignore_errors=True)
    return int(any(row["problem"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
