"""The ranks of a launched run: their process group, and how they agree."""

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

from sft_play.engines.registry import engine_of
from sft_play.errors import LaunchError
from sft_play.job import Job, agreed_plan, job_digest
from sft_play.launch.beats import read_beats
from sft_play.launch.ranks import reports_folder
from sft_play.model.build import local_device

Value = TypeVar("Value")


@contextmanager
def process_group(job: Job) -> Iterator[None]:
    """Joins the process group for the duration of the block; a single process has none.

    If the block fails, the group is not destroyed: destroying it while other ranks still communicate would
    turn one rank's error into a hang of all.
    """
    if job.plan.world_size == 1:
        yield
        return
    if job.ranks.is_main:
        engine_of(job.plan.engine).prepare_launch()
    on_gpu = job.plan.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(local_device("cuda", job.ranks.local_rank))
    timeout = timedelta(seconds=job.config.parallel.timeout_s)
    distributed.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout)
    try:
        yield
    except RuntimeError as error:
        if not str(error).lower().count("timed out"):
            raise
        raise LaunchError(_standstill(job, error)) from error
    distributed.barrier()  # no rank leaves while another still waits for its last message
    distributed.destroy_process_group()


def _standstill(job: Job, error: RuntimeError) -> str:
    """The message of a rank that timed out waiting for the others.

    The launcher then looks for the one that hangs.
    """
    beats = read_beats(job.run, range(job.plan.world_size))
    return "\n".join(
        [
            f"timed out after {job.config.parallel.timeout_s} s (parallel.timeout_s) waiting for the other "
            f"processes: {str(error).splitlines()[0]}",
            *(f"  rank {beat.rank} was last seen {beat.age_s:.0f} s ago in {beat.where}" for beat in beats),
            f"The rank that hangs writes its stack traces to {reports_folder(job.run)}/<rank>.stack",
        ]
    )


def agree_on_plan(job: Job) -> Job:
    """The job with the plan of the rank that has the smallest budget; all ranks must call it.

    Without our launcher each rank makes its own plan, and free memory differs from rank to rank.

    Raises:
        LaunchError: the ranks were given different settings or data.
    """
    if job.plan.world_size == 1:
        return job
    return replace(job, plan=agreed_plan(from_all((job_digest(job), job.plan.to_json()))))


def agree_on_files(job: Job) -> Job:
    """Finds out whether all machines see the same run directory (`run.shared`); all ranks must call it.

    If they do not, each machine keeps its own checkpoints.

    Raises:
        LaunchError: some machines see the run directory of the main one and some do not.
    """
    if not job.ranks.spans_machines:
        return job
    mark = job.run.path / f".seen-by-all-{from_all(uuid.uuid4().hex)[0]}"
    if job.ranks.is_main:
        mark.touch()
    distributed.barrier()
    seen = from_all(mark.exists())
    if job.ranks.is_main:
        mark.unlink(missing_ok=True)
    machine = job.ranks.local_world_size
    here_too = [rank for rank, sees in enumerate(seen) if sees and rank >= machine]
    if here_too and not all(seen):
        raise LaunchError(
            f"only some of the machines share the run directory {job.run.path}; all of them must, or none"
        )
    return replace(job, run=replace(job.run, shared=all(seen)))


def from_all(value: Value) -> list[Value]:
    """What each rank passes, by rank; all ranks must call it. Alone, the list of this one's value."""
    if not distributed.is_initialized():
        return [value]
    everyone: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, value)
    return everyone


def from_main(make: Callable[[], Value]) -> Value:
    """What the main rank makes, on all ranks; all must call it."""
    is_main = not distributed.is_initialized() or distributed.get_rank() == 0
    made: list[Any] = from_all(make() if is_main else None)
    return made[0]


def all_agree(fine: bool) -> bool:
    """Whether `fine` is true on all ranks; all of them must call it."""
    return all(from_all(fine))


def any_rank(asked: bool, device: torch.device) -> bool:
    """Whether it is true on any rank; all must call it. One small tensor, quick enough for every step."""
    if not distributed.is_initialized():
        return asked
    highest = torch.tensor(int(asked), device=device)
    distributed.all_reduce(highest, op=distributed.ReduceOp.MAX)
    return bool(highest)
