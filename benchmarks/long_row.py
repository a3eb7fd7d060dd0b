"""Trains two steps on a single long row with a model of 20 million parameters, through the product itself.

    python -m benchmarks.long_row 32768 131072    # tokens of the row; results/long_row_cpu.json

Full fine-tuning in fp32 on this CPU: attention takes most of the time, which grows with the square of the
tokens, so the model has few layers with few heads, and wide MLPs. The plan's peak memory is compared with the
weights and what PyTorch's allocator holds beside them in two steps (heap_meter.c); what the whole process
took, with Python and its libraries, is another column. Rows that were measured before stay in the result.
"""

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer import DEFAULT_CALLBACKS

from benchmarks.heap_meter import built_meter, loaded_meter
from benchmarks.measurement_log import RESULTS, versions, write_result
from benchmarks.peers.work import TEMPLATE_TOKENS, Row, Work, make_model, words
from sft_play.cli import main as sft_play
from sft_play.machine.gpus import detect
from sft_play.report.tables import formatted
from sft_play.sizing.meters.cpu import storage_bytes
from sft_play.ui.console import console
from sft_play.units import format_bytes

RESULT = RESULTS / "long_row_cpu.json"
SHAPE = dict(
    hidden_size=512,
    intermediate_size=2560,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=64,
)
FROM_SUMMARY = ("supervised_tokens", "predicted_peak_bytes", "train_loss")
PEAK = "peak_bytes"
FROM_PLAN = ("activations", "kept_layers", "mlp_tiles", "micro_batch_tokens")


def work_of(tokens: int, folder: Path) -> Work:
    """The work: one row of so many tokens, a third of which is its question; the model is saved."""
    text = [" " + word for word in random.Random("long").choices(words(), k=tokens - TEMPLATE_TOKENS)]
    row = Row("".join(text[: len(text) // 3]), "".join(text[len(text) // 3 :]))
    work = Work("made up", folder / "model", (row,), (), rows_per_step=1, max_tokens=tokens)
    make_model(work, **SHAPE)
    return work


class Metered(TrainerCallback):
    """Writes the most bytes of weights and tensors while a run trains to a file in its folder."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Counts from now on."""
        self.weights, self.meter = storage_bytes(kwargs["model"]), loaded_meter()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Writes what was the most."""
        file = Path(args.output_dir).parent / PEAK
        file.write_text(str(self.weights + self.meter.meter_peak()), encoding="utf-8")


def trained(tokens: int, folder: Path) -> dict[str, Any]:
    """A row of the result: what the run's plan and its summary say, and what its process took.

    Raises:
        SystemExit: the run failed.
    """
    work = work_of(tokens, folder)
    (row,) = work.rows
    turns = [{"role": "user", "content": row.question}, {"role": "assistant", "content": row.answer}]
    (folder / "rows.jsonl").write_text(json.dumps({"messages": turns}) + "\n", encoding="utf-8")
    config = {
        "model": {"name": str(work.model), "max_seq_len": tokens, "dtype": "float32"},
        "data": {"train_path": str(folder / "rows.jsonl"), "val_fraction": 0},
        "tuning": {"mode": "full"},
        "train": {
            "effective_batch_size": 1,
            "max_steps": 2,  # from the second on, AdamW has its states
            "mixed_precision": "no",
            "probe": False,
            "report_to": [],
        },
        "eval": {"generate": False},
        "output": {"name": "run", "dir": str(folder)},
    }
    (folder / "config.yaml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML, too
    command = [sys.executable, "-m", "benchmarks.long_row", "--train", str(folder / "config.yaml")]
    process = subprocess.Popen(command, env=os.environ | {"LD_PRELOAD": str(built_meter(folder))})
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{shlex.join(command)} failed")
    summary, plan = (json.loads((folder / "run" / f"{n}.json").read_text()) for n in ("summary", "plan"))
    return {
        "row_tokens": tokens,
        **{name: plan["plan"][name] for name in FROM_PLAN},
        **{name: summary.get(name) for name in FROM_SUMMARY},
        "measured_peak_bytes": int((folder / "run" / PEAK).read_text()),
        "process_peak_bytes": used.ru_maxrss * 1024,
        "cpu_seconds": round(used.ru_utime + used.ru_stime),
    }


def main() -> None:
    """Trains on rows of the lengths that are asked for, one after the other, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tokens", nargs="*", type=int, help="tokens of the row")
    parser.add_argument("--train", metavar="CONFIG", help="train this run here, with the meter loaded")
    asked = parser.parse_args()
    if asked.train:
        DEFAULT_CALLBACKS.append(Metered)
        raise SystemExit(sft_play(["train", "--config", asked.train, "--processes", "1"]))
    for tokens in asked.tokens:
        with tempfile.TemporaryDirectory() as folder:
            row = trained(tokens, Path(folder))
        earlier = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
        rows = [each for each in earlier if each["row_tokens"] != tokens] + [row]
        host = detect().host
        made_on = {"cpu": host.cpu_model, "cores": os.cpu_count(), "ram_bytes": host.ram_total_bytes}
        head = {
            "what": "Two steps of full fine-tuning on a single row, fp32, predicted and measured peak memory",
            "made_on": made_on,
            "versions": versions(),
        }
        write_result(RESULT, head, {"rows": sorted(rows, key=lambda each: int(each["row_tokens"]))})
        kinds = ("predicted", "measured", "process")
        sizes = (f"{kind} {formatted(row[f'{kind}_peak_bytes'], format_bytes)}" for kind in kinds)
        console().print(f"{tokens:,} tokens: {', '.join(sizes)}")


if __name__ == "__main__":
    main()
