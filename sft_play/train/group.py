"""The process group of a launched run, and one plan for all its ranks."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch
from torch import distributed

from sft_play.errors import LaunchError
from sft_play.job import Job
from sft_play.launch.beats import read_beats
from sft_play.launch.extensions import clear_abandoned_locks, extensions_folder
from sft_play.launch.ranks import reports_folder
from sft_play.model import local_device
from sft_play.runlog import is_main_rank
from sft_play.sizing.planner import Plan


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
    given = hashlib.sha256(f"{job.config.model_dump_json()} {job.data.cache_path.name}".encode()).hexdigest()
    all_ranks: list = [None] * job.plan.world_size
    distributed.all_gather_object(all_ranks, (given, job.plan.to_json()))
    if len({given for given, _ in all_ranks}) > 1:
        raise LaunchError("the processes were given different settings or data; start all with the same config and overrides")
    plans = [Plan.from_json(tree) for _, tree in all_ranks]
    return replace(job, plan=min(plans, key=lambda plan: plan.memory.budget_bytes if plan.memory else 0))
