"""A run small enough for two machines that are one, and what it comes to on one process."""

import signal
from pathlib import Path

import pytest
import torch

from sft_play.runlog import RunDir, read_json, read_metrics
from tests.integration.cli import make_workspace, sft

CLOSE = 1e-5  # relative; fp32, sums in another order


@pytest.fixture(scope="session", autouse=True)
def _cleaned_up_when_stopped():
    """SIGTERM, as from `timeout`, ends the tests like Ctrl-C: what they started is ended first."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def config(tiny_model, tmp_path_factory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("cluster"), tiny_model)


@pytest.fixture(scope="session")
def alone(config, tmp_path_factory):
    """The run of one process with these settings."""
    runs: dict[tuple[str, ...], RunDir] = {}

    def of(*settings: str) -> RunDir:
        if settings not in runs:
            name = f"alone{len(runs)}"
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            done = sft("train", "--config", config, *settings, f"output.name={name}")
            torch.set_num_threads(threads)
            assert done.code == 0, done.err
            runs[settings] = RunDir(config.parent / "runs" / name)
        return runs[settings]

    return of


def assert_same_curve(run: RunDir, other: RunDir) -> None:
    """Every training and evaluation loss of two finished runs."""
    for key in ("train/loss", "eval/loss"):
        ours, theirs = ([(r["step"], r[key]) for r in read_metrics(one) if key in r] for one in (run, other))
        assert ours and [step for step, _ in ours] == [step for step, _ in theirs], (key, ours, theirs)
        assert [loss for _, loss in ours] == pytest.approx([loss for _, loss in theirs], rel=CLOSE), key
    assert [read_json(one.summary)["status"] for one in (run, other)] == ["done", "done"]
