"""Processes that divide the tokens of a micro-batch give the curve of one process (fp32, no dropout).

The tiny model has 4 heads and 2 key and value heads, so that 4 processes have fewer of these than there are of them.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sft_play.runlog import RunDir
from sft_play.train.run import train
from tests.integration.jobs import SEQ, make_job
from tests.integration.processes import assert_same_curve, launch_jobs
from tests.rounding import summed

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]

NEAR = summed(12 * SEQ)  # as in test_many_processes.py
CLOSE = {
    "train/loss": NEAR,
    "eval/loss": NEAR,
    "eval/token_accuracy": 1e-6,
    "train/grad_norm": NEAR,
    "train/learning_rate": 0,
}
STEPS, SAVED = 6, 3
COMMON = {
    "max_steps": STEPS, "save_steps": SAVED, "eval_steps": SAVED, "effective_batch_size": 12, "batch_size": 3,
    "weight_decay": 0.1,
}  # fmt: skip
PACKED = {"packing": True, "effective_batch_size": 12 * SEQ, "batch_size": 3 * SEQ}
KINDS = {
    "lora-joined": {"mode": "lora"},
    "full-packed": {"mode": "full", "learning_rate": 1e-3, **PACKED},
    "full-joined": {"mode": "full", "learning_rate": 1e-3, "max_grad_norm": 0.1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("sequence")


@pytest.fixture(scope="module")
def one(tiny_model, folder):
    """The curves of one process, by kind."""
    for kind, settings in KINDS.items():
        train(make_job(tiny_model, folder, f"one-{kind}", **{**COMMON, **settings}))
    return folder


@pytest.fixture(scope="module")
def launch(tiny_model, one, folder):
    """Trains jobs, all in one launch: settings beside a kind's by name."""

    def run(engine: str, processes: int, jobs: dict[str, dict]) -> None:
        specs = [
            {"model": str(tiny_model), "name": name, "settings": {**COMMON, **settings}}
            for name, settings in jobs.items()
        ]
        launch_jobs(folder, engine, processes, specs)

    return run


def job(kind: str, ranks: int, **settings) -> dict:
    return {**KINDS[kind], "sequence_parallel_size": ranks, **settings}


def checkpoint(folder: Path, name: str) -> str:
    return str(folder / name / "checkpoints" / f"checkpoint-{SAVED}")


@pytest.fixture(scope="module")
def ddp(launch, folder):
    """DDP on two processes, one micro-batch at a time."""
    launch(
        "ddp",
        2,
        {
            "ddp2-lora-joined": job("lora-joined", 2, probe=True),
            "ddp2-full-packed": job("full-packed", 2),
            "from-one-full-joined": job("full-joined", 2, resume=checkpoint(folder, "one-full-joined")),
        },
    )
    return folder


@pytest.fixture(scope="module")
def fsdp2(ddp, launch, folder):
    """FSDP2 on four processes: two micro-batches at a time on two each, or one on all four."""
    launch(
        "fsdp2",
        4,
        {
            "fsdp2x2-lora-joined": job("lora-joined", 2, gradient_checkpointing=True),
            "fsdp4-full-joined": job("full-joined", 4, probe=True),
            "from-ddp2-full-packed": job("full-packed", 2, resume=checkpoint(folder, "ddp2-full-packed")),
        },
    )
    return folder


@pytest.mark.parametrize("name", ["ddp2-lora-joined", "ddp2-full-packed"])
def test_two_processes_have_the_curve_of_one(ddp, name):
    assert_same_curve(ddp / name, ddp / f"one-{name.partition('-')[2]}", CLOSE)


@pytest.mark.parametrize("name", ["fsdp2x2-lora-joined", "fsdp4-full-joined"])
def test_four_processes_have_the_curve_of_one(fsdp2, name):
    assert_same_curve(fsdp2 / name, fsdp2 / f"one-{name.partition('-')[2]}", CLOSE)


def test_a_run_goes_on_with_another_number(fsdp2):
    assert_same_curve(fsdp2 / "from-one-full-joined", fsdp2 / "one-full-joined", CLOSE, after=SAVED)
    assert_same_curve(fsdp2 / "from-ddp2-full-packed", fsdp2 / "one-full-packed", CLOSE, after=SAVED)
