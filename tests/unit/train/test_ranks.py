"""What communication costs is measured once, and a measurement that fails changes nothing."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from sft_play.config.schema import RunConfig
from sft_play.errors import LaunchError
from sft_play.launch.ranks import SINGLE_PROCESS, RankEnvironment
from sft_play.machine.gpus import detect
from sft_play.planning.speed.devices import device_name, read_collectives
from sft_play.train import ranks
from tests.plans import plan_with
from tests.unit.train.plans import PLAN


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job for two processes, in a process group of one."""
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path))
    monkeypatch.setattr(ranks, "SIZES", (1 << 10, 1 << 14))
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield SimpleNamespace(
        plan=plan_with(PLAN, world_size=2, engine="ddp"),
        config=RunConfig.model_validate({"model": {"name": "x"}, "data": {"train_path": "x"}}),
        machine=replace(detect(), gpus=()),
        ranks=SINGLE_PROCESS,
    )
    distributed.destroy_process_group()


def known(job):
    return read_collectives(device_name(job.machine))


def test_it_is_measured_once(job, capsys, monkeypatch):
    assert ranks.with_known_exchange(job) is job  # without a prediction there is nothing to plan again
    found = known(job)[2]
    for curve in (found.all_reduce, found.all_gather, found.reduce_scatter):
        assert curve.sizes == ranks.SIZES and min(curve.seconds) > 0
    assert "measured between 2 processes, once" in capsys.readouterr().out
    monkeypatch.setattr(ranks, "_measure", None)
    assert ranks.with_known_exchange(job) is job


def test_sizes_that_would_take_too_long_are_left_out(job, monkeypatch):
    monkeypatch.setattr(ranks, "ENOUGH_S", 0.0)
    ranks.with_known_exchange(job)
    assert known(job)[2].all_reduce.sizes == ranks.SIZES[:1]


@pytest.mark.parametrize("what", ["operation", "memory"])
def test_a_measurement_that_fails_changes_nothing(job, monkeypatch, capsys, what):
    def broken(*_, **__):
        raise RuntimeError("no such operation")

    if what == "operation":
        monkeypatch.setattr(distributed, "all_gather_into_tensor", broken)
    else:
        monkeypatch.setattr(ranks, "_tensors", lambda *_: None)
    assert ranks.with_known_exchange(job) is job and known(job) == {}
    reason = "no such operation" if what == "operation" else "too little memory is free"
    assert f"could not be measured: {reason}" in " ".join(capsys.readouterr().out.split())


def test_without_a_probe_nothing_is_measured(job):
    quiet = job.config.model_copy(update={"train": job.config.train.model_copy(update={"probe": False})})
    job.config = quiet
    ranks.with_known_exchange(job)
    assert known(job) == {}


def test_a_process_without_a_gpu_of_its_own_is_refused(job, monkeypatch):
    """As where SLURM shows each task one GPU alone."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    job.plan, job.ranks = (
        replace(job.plan, device="cuda"),
        RankEnvironment(rank=5, local_rank=1, world_size=8),
    )
    with pytest.raises(
        LaunchError, match=r"process 5 is number 1 of its machine .* and sees 1 GPU; start one"
    ):
        with ranks.process_group(job):
            pass


@pytest.mark.parametrize(("driver", "found"), [("535.183.01", "1"), ("580.65.06", None)])
def test_two_rtx_4090_train_with_an_old_driver_too(job, monkeypatch, tmp_path, driver, found):
    """accelerate asks nvidia-smi for all GPUs of the machine, and wants the variables for one process as well."""
    gpus, smi = "\\n".join(["2, NVIDIA GeForce RTX 4090"] * 2), tmp_path / "nvidia-smi"
    smi.write_text(f'#!/bin/sh\ncase "$1" in *driver*) echo {driver};; *) printf "{gpus}";; esac\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"):
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        del os.environ[name]
    job.plan = plan_with(PLAN, device="cuda")
    with ranks.process_group(job):
        assert [os.environ.get(name) for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")] == [found] * 2
