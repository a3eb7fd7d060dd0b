"""Offloading changes where tensors are, and nothing that is learned: on a CPU, to the bit."""

import os
import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero import stage3
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from sft_play.engines.state import MOMENTS
from sft_play.engines.stored import part_of
from sft_play.engines.zero3_parts import OPTIMIZER
from sft_play.errors import StorageError
from sft_play.runlog import RunDir, read_json, read_metrics
from sft_play.sizing.meters.cpu import storage_bytes
from sft_play.train.ranks import process_group
from sft_play.train.run import train
from sft_play.train.session import prepare_session
from sft_play.units import MIB
from tests.integration.processes import launch_jobs
from tests.jobs import losses, make_job
from tests.rounding import assert_same_values, summed

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]

FULL = dict(
    mode="full", learning_rate=1e-3, batch_size=8, max_steps=4, save_steps=2, eval_steps=2
)  # ZeRO-3 takes longest for a micro-batch, of whatever size
WEIGHTS = {"full": "model/model.safetensors", "lora": "adapter/adapter_model.safetensors"}


def weights(run: Path, mode: str) -> dict[str, torch.Tensor]:
    return load_file(run / WEIGHTS["full" if mode == "full" else "lora"])


def assert_equal_weights(one: Path, other: Path, mode: str) -> None:
    found, expected = weights(one, mode), weights(other, mode)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@contextmanager
def watching_weights(seen: set[bool]) -> Iterator[None]:
    """Adds whether the weights that ZeRO-3 divides are in files, whenever a module that has some is called."""

    known: set[int] = set()  # to look for a place in the maps of a process takes milliseconds

    def look(module: torch.nn.Module, *_) -> None:
        parts = [each.ds_tensor for each in module.parameters(recurse=False) if hasattr(each, "ds_tensor")]
        if new := {part.data_ptr() for part in parts} - known:
            known.update(new)
            seen.update(mapped(parts))

    with register_module_forward_pre_hook(look):
        yield


@contextmanager
def watching_steps(look: Callable[[torch.optim.Optimizer], None]) -> Iterator[None]:
    """Looks at an optimizer of torch's after each of its steps."""
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: look(optimizer))
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.thorough
def test_one_process_trains_a_divided_model(tiny_model, tmp_path):
    """Its parameters are DTensors with the policy of offloading, and its checkpoint goes on without it."""
    alone = make_job(tiny_model, tmp_path, "alone", **FULL)
    train(alone)
    job = make_job(tiny_model, tmp_path, "offloaded", **FULL, offload="ram")
    assert (job.plan.sharing.engine, job.plan.sharing.offload, job.plan.sharing.shards) == ("fsdp2", "ram", 1)
    with process_group(job):
        model = prepare_session(job).trainer.model
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        groups = [unit._get_fsdp_state()._fsdp_param_group for unit in (model, *model.model.layers)]
        assert all(part.offload_to_cpu for group in groups for part in group.fsdp_params)
        train(job)
    assert read_json(job.run.summary)["measured_ram_bytes"] > 100 * MIB  # interpreter and libraries
    assert "measured_ram_bytes" in read_json(alone.run.summary)
    for ours, theirs in zip(losses(job), losses(alone), strict=True):
        assert_same_values(ours, theirs, summed(16 * 64))

    checkpoint = str(tmp_path / "offloaded" / "checkpoints" / "checkpoint-2")
    resumed = make_job(tiny_model, tmp_path, "resumed", **FULL, resume=checkpoint)
    train(resumed)
    assert_same_values(losses(resumed)[0], losses(job)[0][2:], summed(16 * 64))


@pytest.mark.thorough
def test_one_process_trains_with_zero3_and_leaves_nothing_behind(tiny_model, tmp_path):
    """Weights and AdamW's states are in RAM by DeepSpeed's account; other runs follow in the same process."""
    away = dict(FULL, engine="deepspeed_z3", offload="ram")
    linear, variables = torch.nn.functional.linear, set(os.environ)
    alone = make_job(tiny_model, tmp_path, "alone", **FULL)
    train(alone)
    job = make_job(tiny_model, tmp_path, "offloaded", **away)
    assert (job.plan.sharing.engine, job.plan.sharing.offload, job.plan.sharing.shards) == (
        "deepspeed_z3",
        "ram",
        1,
    )
    with process_group(job):
        trainer = prepare_session(job).trainer
        arguments = trainer.args.hf_deepspeed_config.config["zero_optimization"]
        assert {arguments[name]["device"] for name in ("offload_optimizer", "offload_param")} == {"cpu"}
        parameters: Any = list(trainer.model.parameters())
        assert all(hasattr(parameter, "ds_tensor") for parameter in parameters)
        assert storage_bytes(trainer.model) >= sum(4 * parameter.ds_numel for parameter in parameters)
        train(job)
    assert not {"LOCAL_RANK", "ACCELERATE_USE_DEEPSPEED", "MASTER_PORT"} & (os.environ.keys() - variables)
    assert torch.nn.functional.linear is linear
    for ours, theirs in zip(losses(job), losses(alone), strict=True):
        assert_same_values(ours, theirs, summed(16 * 64))

    checkpoint = str(tmp_path / "offloaded" / "checkpoints" / "checkpoint-2")
    resumed = make_job(tiny_model, tmp_path, "resumed", **FULL, resume=checkpoint)
    train(resumed)
    assert_same_values(losses(resumed)[0], losses(job)[0][2:], summed(16 * 64))
    again = make_job(tiny_model, tmp_path, "again", **away, resume=checkpoint)
    with process_group(again):
        train(again)
    assert_equal_weights(tmp_path / "again", tmp_path / "offloaded", "full")


def mapped(tensors: Iterable[torch.Tensor]) -> set[bool]:
    """Whether these tensors are in files."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split()[0].split("-") for line in lines if "/sft-play-" in line]
    places = [range(int(first, 16), int(last, 16)) for first, last in mapped]
    return {any(tensor.data_ptr() in place for place in places) for tensor in tensors}


def mapped_states(optimizer: torch.optim.Optimizer) -> set[bool]:
    """Whether moments of an optimizer are in files, and with ZeRO-3 what it updates."""
    moments = mapped(part_of(state[key]) for state in optimizer.state.values() for key in MOMENTS)
    trained = (each for group in optimizer.param_groups for each in group["params"])
    vectors = (each for each in trained if hasattr(each, "ds_id") and not hasattr(each, "ds_tensor"))
    return moments | mapped(vectors)


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed_z3"])
def test_states_on_a_disk_change_nothing(tiny_model, tmp_path, engine):
    """In one process, resumed or not; their files have no names. With ZeRO-3, its weights are there too."""
    disk = tmp_path / "disk"
    disk.mkdir()
    settings = FULL | dict(engine=engine, offload="ram")
    checkpoint = str(tmp_path / "files" / "checkpoints" / "checkpoint-2")
    kinds = {
        "ram": {},
        "files": {"nvme_path": str(disk)},
        "resumed": {"nvme_path": str(disk), "resume": checkpoint},
    }
    found = {}
    for name, more in kinds.items():
        job = make_job(tiny_model, tmp_path, name, **settings, **more)
        seen = found[name] = set()
        steps = watching_steps(lambda each, seen=seen: seen.update(mapped_states(each)))
        weights_seen = set()
        with process_group(job), steps, watching_weights(weights_seen):
            train(job)
        assert weights_seen == (seen if engine == "deepspeed_z3" else set())
        assert not list(disk.iterdir())
        assert_equal_weights(tmp_path / name, tmp_path / "ram", "full")
    assert found == {"ram": {False}, "files": {True}, "resumed": {True}}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        ("full", "bfloat16"),
        pytest.param("lora", "auto", marks=pytest.mark.slow),
        pytest.param("qlora", "auto", marks=pytest.mark.slow),
    ],
)
def test_zero3_reads_weights_from_a_disk(tiny_model, tmp_path, mode, dtype):
    """Whenever a module is called, and learns the same."""
    disk = tmp_path / "disk"
    disk.mkdir()
    settings = dict(mode=mode, dtype=dtype, engine="deepspeed_z3", offload="ram", batch_size=8, max_steps=2)
    found: dict[str, set[bool]] = {}
    for name, folder in (("ram", None), ("files", str(disk))):
        job = make_job(tiny_model, tmp_path, name, **settings, nvme_path=folder)
        seen = found[name] = set()
        with process_group(job), watching_weights(seen):
            train(job)
    assert found == {"ram": {False}, "files": {True}}
    assert stage3.DeepSpeedZeroOptimizer_Stage3 is OPTIMIZER  # for what follows in this process
    assert not list(disk.iterdir())
    assert_equal_weights(tmp_path / "files", tmp_path / "ram", mode)


def test_a_disk_without_room_for_the_states_ends_the_run_in_a_sentence(tiny_model, tmp_path):
    settings = dict(mode="full", engine="fsdp2", offload="ram", nvme_path=str(tmp_path))
    job = make_job(tiny_model, tmp_path, "full", **settings)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (1 << 12, before[1])
    )  # files of 4 KiB, as if the disk were full
    try:
        with process_group(job), pytest.raises(StorageError, match="parallel.nvme_path=.* has no room for"):
            prepare_session(job).trainer.create_optimizer()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "lora", "qlora"])
@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed_z3"])
def test_two_processes_learn_the_same_with_and_without(tiny_model, tmp_path, engine, mode):
    """Bit for bit, resumed or not; one process goes on from their checkpoint."""
    common = FULL | {"mode": mode, "batch_size": 4}  # two micro-batches a step
    again = {"resume": str(tmp_path / "ram" / "checkpoints" / "checkpoint-2"), "offload": "ram"}
    files = again | {"nvme_path": str(tmp_path)}
    kinds = {"plain": {"offload": "none"}, "ram": {"offload": "ram"}, "resumed": again, "files": files}
    specs = [
        {"model": str(tiny_model), "name": name, "settings": common | more} for name, more in kinds.items()
    ]
    launch_jobs(tmp_path, engine, 2, specs)
    assert_equal_weights(tmp_path / "ram", tmp_path / "plain", mode)
    assert_equal_weights(tmp_path / "resumed", tmp_path / "plain", mode)
    assert_equal_weights(tmp_path / "files", tmp_path / "plain", mode)
    alone = make_job(tiny_model, tmp_path, "alone", **common, resume=again["resume"])
    train(alone)
    tolerance = 2e-4 if mode == "qlora" else summed(16 * 64)  # the 4-bit kernel may round by the shape
    found = [r["train/loss"] for r in read_metrics(RunDir(tmp_path / "ram")) if "train/loss" in r]
    assert_same_values(losses(alone)[0], found[2:], tolerance)
