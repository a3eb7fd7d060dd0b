"""Two processes, with whole weights and with divided ones, give the curve of one and resume from each other.

The launch that `make test` has; test_many_processes.py has the other engines and kinds of jobs.
"""

from pathlib import Path

import pytest

from sft_play.train.run import train
from tests.integration.processes import CLOSE, assert_same_curve, launch_jobs
from tests.jobs import make_job

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]

STEPS, SAVED = 4, 2
FULL = {
    "mode": "full", "learning_rate": 1e-3, "effective_batch_size": 12, "batch_size": 2, "weight_decay": 0.1,
    "max_steps": STEPS, "save_steps": SAVED, "eval_steps": SAVED,
}  # fmt: skip
LORA = {**FULL, "mode": "lora", "learning_rate": 5e-3}


def saved_by(folder: Path, name: str) -> dict[str, str]:
    return {"resume": str(folder / name / "checkpoints" / f"checkpoint-{SAVED}")}


@pytest.fixture(scope="module")
def runs(tiny_model, tmp_path_factory) -> Path:
    """The folder of runs on one process, and on two, all in one launch."""
    folder = tmp_path_factory.mktemp("two-processes")
    for name, settings in {"one-lora": LORA, "one-full": FULL}.items():
        train(make_job(tiny_model, folder, name, **settings))
    jobs = {
        "fsdp2": FULL,
        "ddp": LORA | {"engine": "ddp"},
        "fsdp2-to-ddp": FULL | {"engine": "ddp"} | saved_by(folder, "fsdp2"),
        "one-to-fsdp2": LORA | saved_by(folder, "one-lora"),
    }
    specs = [{"model": str(tiny_model), "name": name, "settings": job} for name, job in jobs.items()]
    launch_jobs(folder, "fsdp2", 2, specs)
    return folder


@pytest.mark.parametrize(("name", "reference"), [("ddp", "one-lora"), ("fsdp2", "one-full")])
def test_two_processes_learn_what_one_does(runs, name, reference):
    assert_same_curve(runs / name, runs / reference, CLOSE)


@pytest.mark.parametrize(("name", "reference"), [("fsdp2-to-ddp", "one-full"), ("one-to-fsdp2", "one-lora")])
def test_a_checkpoint_goes_on_with_another_engine(runs, name, reference):
    assert_same_curve(runs / name, runs / reference, CLOSE, after=SAVED)
