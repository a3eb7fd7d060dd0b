"""The process group of a launched run, and what its ranks agree on before they load a model."""

import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from sft_play.errors import CheckpointError, LaunchError
from sft_play.job import Job, agreed_plan, fingerprint
from sft_play.launch.beats import read_beats
from sft_play.launch.extensions import clear_abandoned_locks, extensions_folder
from sft_play.launch.ranks import reports_folder
from sft_play.model import local_device
from sft_play.runlog import is_main_rank
from sft_play.train.checkpoints import STATE, find_checkpoint


@contextmanager
def process_group(job: Job) -> Iterator[None]:
    """Joins the ranks, with the config's timeout; a process alone has no group. Left behind where the block fails.

    A group that is taken down while others still talk in it would turn one rank's error into a wait of all.
    """
    if job.plan.world_size == 1:
        yield
        return
    if job.plan.engine == "deepspeed_z2" and is_main_rank():
        clear_abandoned_locks(extensions_folder())
    on_gpu = job.plan.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(local_device("cuda"))
    timeout = timedelta(seconds=job.config.parallel.timeout_s)
    distributed.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout)
    try:
        yield
    except RuntimeError as error:
        if not str(error).lower().count("timed out"):
            raise
        raise LaunchError(_standstill(job, error)) from error
    distributed.barrier()  # nobody leaves while another still waits for its last message
    distributed.destroy_process_group()


def _standstill(job: Job, error: RuntimeError) -> str:
    """What a rank says that has waited for the others in vain; our launcher then looks for the one that hangs."""
    beats = read_beats(job.run, range(job.plan.world_size))
    return "\n".join(
        [
            f"the wait for the other processes timed out after {job.config.parallel.timeout_s} s (parallel.timeout_s): "
            f"{str(error).splitlines()[0]}",
            *(f"  rank {beat.rank} was last seen {beat.age_s:.0f} s ago in {beat.where}" for beat in beats),
            f"The one that hangs writes where it is to {reports_folder(job.run)} as <rank>.stack",
        ]
    )


def agree_on_plan(job: Job) -> Job:
    """The job with the plan of the rank that has the least memory to spend; all ranks take part.

    Without a launcher of ours nobody has made one plan for all, and free memory differs from rank to rank.

    Raises:
        LaunchError: the ranks were given different settings or data.
    """
    if job.plan.world_size == 1:
        return job
    return replace(job, plan=agreed_plan(_from_all((fingerprint(job), job.plan.to_json()))))


def agree_on_files(job: Job) -> Job:
    """On several machines, the job that knows whether all see one run directory; all ranks take part.

    If they do not, each machine keeps checkpoints of its own, and all must hold the same one to go on from.

    Raises:
        LaunchError: some machines see the run directory of the main one and some do not.
        CheckpointError: the machines hold different checkpoints.
    """
    if job.plan.world_size == int(os.environ.get("LOCAL_WORLD_SIZE", job.plan.world_size)):
        return job
    mark = job.run.path / f".seen-by-all-{_from_all(uuid.uuid4().hex)[0]}"
    if is_main_rank():
        mark.touch()
    distributed.barrier()
    seen = _from_all(mark.exists())
    if is_main_rank():
        mark.unlink(missing_ok=True)
    machine = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    here_too = [rank for rank, sees in enumerate(seen) if sees and rank >= machine]
    if here_too and not all(seen):
        raise LaunchError(f"the run directory {job.run.path} is shared by some of the machines; let all share it, or none")
    job = replace(job, run=replace(job.run, shared=all(seen)))
    checkpoint, _ = find_checkpoint(job.run, job.config.train.resume)
    held = _from_all(_described(checkpoint))
    if len(set(held)) > 1:
        lines = [f"rank {rank}: {text}" for rank, text in enumerate(held)]
        raise CheckpointError(
            "\n  ".join(["the machines do not hold the same checkpoint:", *lines])
            + f"\nCopy {job.run.checkpoints} from one machine to the others (with ZeRO-2 each has a part: merge the folders), "
            "or put output.dir on a disk that all share"
        )
    return job


def _described(checkpoint: Path | None) -> str:
    """Folder and history of a checkpoint, the same on all machines that saved it."""
    if checkpoint is None:
        return "none"
    history = json.loads((checkpoint / STATE).read_text(encoding="utf-8")).get("log_history")
    return f"{checkpoint.name} ({hashlib.sha256(json.dumps(history).encode()).hexdigest()[:8]})"


def _from_all(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, value)
    return everyone
