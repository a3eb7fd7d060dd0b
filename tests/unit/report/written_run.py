"""The files of a run, as training, `make eval` and the planner write them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sft_play.config.load import ResolvedConfig, dump_resolved
from sft_play.config.schema import RunConfig
from sft_play.plan import Memory, Plan
from sft_play.report import plots
from sft_play.runlog import RunDir, append_metrics
from sft_play.units import GIB, MIB
from tests.plans import plan_of

STEPS = 20
ATTACK = "<script>alert(1)</script>"
SECTIONS = (
    "training", "answers", "scores", "memory", "speed", "scaling", "data", "chosen", "asked", "environment",
)  # fmt: skip
TERMS = {"weights": 300 * MIB, "adapters": 10 * MIB, "activations": 600 * MIB, "temporaries": 114 * MIB}
SPLIT = {
    "rows": 100,
    "tokens": 5000,
    "supervised_tokens": 2500,
    "truncated": 3,
    "dropped": {"empty": 2},
    "lengths": {"p50": 40, "p90": 80, "p99": 90, "max": 400},
    "histogram": {"start": 10, "width": 3, "rows": [4, 60, 35], "longer": 1},
}


@pytest.fixture
def no_plots(monkeypatch):
    """Pages without drawings: what test_plots.py shows need not be drawn for every page."""
    monkeypatch.setattr(plots, "_svg", lambda title, draw, height: f'<svg aria-label="{title}"></svg>')


def make_settings(name: str, note: str = "", **train: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"name": "/home/ann/models/base"},
            "data": {
                "train_path": "/home/ann/rows.jsonl",
                "val_path": "/home/ann/val.jsonl",
                "chat_template": "/home/ann/chat.jinja",
            },
            "train": {"max_steps": STEPS, "learning_rate": 1e-3, **train},
            "output": {"name": name, "note": note},
        }
    )


def make_plan(world_size: int = 1) -> Plan:
    memory = Memory(
        budget_bytes=2 * GIB,
        peak_bytes=GIB,
        peak_phase="backward",
        phases={"load": 310 * MIB, "backward": GIB},
        terms=TERMS | {"context": 0},
        phase_terms={"load": {"weights": 300 * MIB, "adapters": 10 * MIB}, "backward": TERMS},
        guard_bytes=1,
    )
    return plan_of(
        micro_batch_size=4,
        gradient_accumulation_steps=2,
        effective_batch_size=8 * world_size,
        world_size=world_size,
        engine="none" if world_size == 1 else "ddp",
        max_seq_len=400,
        packing=False,
        activations="keep",
        mixed_precision="no",
        dtype="float32",
        attention="sdpa",
        learning_rate=1e-3,
        steps_per_epoch=10,
        total_steps=STEPS,
        device="cpu",
        step_seconds=0.5,
        memory=memory,
        why=("micro-batch 4: the fastest that fits",),
        alternatives=(
            {
                "micro_batch_size": 2,
                "gradient_accumulation_steps": 4,
                "gradient_checkpointing": True,
                "engine": "none",
                "peak_bytes": GIB // 4,
                "process_bytes": GIB // 2,
                "fits": True,
                "relative_speed": 0.75,
            },
        ),
    )


def make_summary(world_size: int = 1) -> dict[str, Any]:
    return {
        "status": "done",
        "world_size": world_size,
        "optimizer_steps": STEPS,
        "tokens_per_second": 1000.0 * world_size,
        "training_seconds": 12.0,
        "padding_share": 0.0,
        "data_wait": 0.05,
        "mfu": None,
        "predicted_step_seconds": 0.5,
        "measured_step_seconds": 0.6,
        "predicted_peak_bytes": GIB,
        "measured_peak_bytes": GIB + 10 * MIB,
        "train_loss": 0.5,
        "supervised_tokens": 2500,
        "probe": {"phases": {"load": 320 * MIB, "backward": GIB + 10 * MIB}},
        "eval": {
            "before": {"loss": 2.0, "exact_match": 0.0, "answered_rows": 10, "split": "test"},
            "after": {"loss": 0.75, "exact_match": 0.5, "answered_rows": 10, "split": "test"},
        },
        "samples": [{"prompt": "1 + 1?", "reference": "2", "before": "", "after": f"2 {ATTACK}"}],
    }


def make_scaling() -> list[dict[str, Any]]:
    row = {
        "world_size": 1,
        "engine": "none",
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "effective_batch_size": 8,
        "steps_per_epoch": 10,
        "learning_rate": 1e-3,
        "learning_rates": {"none": 1e-3, "sqrt": 1e-3, "linear": 1e-3},
        "lr_scaling": "none",
        "reference_batch_size": 8,
        "peak_bytes": GIB,
        "process_bytes": None,
        "exchanged_bytes": 0,
        "links": (),
        "speed_up": 1.0,
        "speed_up_at_most": 1.0,
    }
    two = {"world_size": 2, "engine": "ddp", "gradient_accumulation_steps": 1, "speed_up": 1.8}
    sent = {"exchanged_bytes": 3 * GIB, "links": (25e9,)}
    return [row, row | two | sent, {"world_size": 4, "problem": "fewer rows than processes"}]


def begin(
    path: Path, *, world_size: int = 1, origin: str = "/home/ann/run.yaml", note: str = "", **train: Any
) -> RunDir:
    """A run before its first step."""
    run = RunDir(path)
    path.mkdir(parents=True)
    given = [
        "model.name",
        "data.train_path",
        "data.val_path",
        "train.max_steps",
        *(f"train.{key}" for key in train),
    ]
    origins = dict.fromkeys(given, origin) | {"train.learning_rate": "override"}
    config = make_settings("written", note, **train)
    run.config.write_text(dump_resolved(ResolvedConfig(config, origins, Path(origin))))
    run.write_json(run.plan, make_plan(world_size).to_json())
    data = {"fingerprint": "abc123", "train": SPLIT, "val": SPLIT, "test": None, "warnings": ["few rows"]}
    run.write_json(run.data, data)
    environment = {
        "started": "2026-11-20 10:30",
        "commit": "0123456789ab",
        "command": "make train CONFIG=/home/ann/run.yaml",
        "versions": {"sft_play": "0.1.0", "torch": "2.13.0"},
        "python": "3.11.7",
        "system": "Linux x86_64",
        "gpus": [{"name": "NVIDIA H100", "total_bytes": 80 * GIB, "link": None}],
        "driver": "570.1",
        "cuda": "12.8",
        "cpu": "Xeon",
        "cpu_cores": 2,
        "ram_bytes": 24 * GIB,
    }
    run.write_json(run.environment, environment)
    return run


def train(run: RunDir, steps: int = STEPS) -> RunDir:
    """Its records up to a step."""
    append_metrics(run, {"step": 0, "eval/loss": 2.0, "eval/token_accuracy": 0.1})
    for step in range(1, steps + 1):
        record = {
            "step": step,
            "train/loss": 2.0 - step / 20,
            "train/grad_norm": None if step == 3 else 1.0,
            "train/learning_rate": 1e-3,
            "speed/tokens_per_second": 1000.0,
            "speed/step_seconds": 0.6,
        }
        append_metrics(run, record)
    return run


def finish(run: RunDir, world_size: int = 1) -> RunDir:
    """What it leaves at its end, and after `make eval`."""
    run.write_json(run.summary, make_summary(world_size))
    run.write_json(run.scaling, {"scaling": make_scaling()})
    run.write_json(
        run.path / "eval.val.json", {"split": "val", "loss": 0.7, "rouge_l": 0.9, "answered_rows": 9}
    )
    answer = {"messages": [{"role": "user", "content": "3 + 4?"}], "reference": "7", "generated": "seven"}
    (run.path / "eval.val.jsonl").write_text(json.dumps(answer) + "\n")
    return run


def finished(path: Path, *, world_size: int = 1, **settings: Any) -> RunDir:
    """A whole run."""
    return finish(train(begin(path, world_size=world_size, **settings)), world_size)


HOLD = """
import sys
from pathlib import Path
from sft_play.runlog import RunDir, hold_run
with hold_run(RunDir(Path(sys.argv[1]))):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held(run: RunDir) -> Iterator[None]:
    """Within it another process holds the run, as training does."""
    command = [sys.executable, "-c", HOLD, str(run.path)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        yield
    finally:
        holder.communicate()


def written_later(path: Path, seconds: float = 1) -> None:
    """Gives a file a time after that of a lock that is held already."""
    os.utime(path, times=(time.time() + seconds,) * 2)
