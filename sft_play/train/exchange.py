"""Measures what collective operations cost, between the ranks of the first run of so many processes.

Only the ranks of a run have each other. They measure in a process group of their own: an error in it, and the
buffers that its communicator holds, leave the run as it is.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from sft_play.job import Job, find_plan
from sft_play.model.build import local_device
from sft_play.planning.collectives import SIZES, Collectives
from sft_play.planning.profile import Curve
from sft_play.planning.profiles import device_name, read_collectives, write_collectives
from sft_play.report.progress import spinner
from sft_play.runlog import console
from sft_play.train.ranks import all_agree, from_all, from_main
from sft_play.units import counted, format_bytes, format_duration

RUNS = 5  # of each operation and size; the fastest one counts
ENOUGH_S = 1.0  # a larger tensor is measured only if that is expected to take less
GLOO_TIMEOUT_S = 30  # NCCL ends the process after a timeout, so there it is that of the run

Tensors = tuple[torch.Tensor, torch.Tensor]


def with_known_exchange(job: Job) -> Job:
    """The job, planned again if what communication costs has just been measured; all ranks must call it.

    If it cannot be measured, the plan stays as it is.
    """
    count = job.plan.world_size
    if count == 1 or job.config.train.probe is False:
        return job
    device = device_name(job.machine)
    if from_main(lambda: count in read_collectives(device)):
        return job
    found, problem = None, ""
    with spinner(f"measuring what communication between {count} processes costs, once"):
        try:
            found = _measure(job)
        except RuntimeError as error:
            problem = str(error).splitlines()[0]
        problems = [one for one in from_all(problem) if one]
    if problems or not found:
        console().print(f"  [yellow]communication could not be measured:[/] {problems[0]}")
        return job
    curve = found.all_reduce
    size, seconds = format_bytes(int(curve.sizes[-1])), format_duration(curve.seconds[-1])
    between = counted(count, "process")
    console().print(f"  [dim]measured between {between}, once: all-reduce of {size} in {seconds}[/]")
    if job.ranks.is_main:
        write_collectives(device, count, found)
    return _planned_again(job)


def _planned_again(job: Job) -> Job:
    """The job with the plan that is fastest now, of the same engine and budget."""
    if not job.plan.step_seconds:
        return job
    plan = from_main(lambda: find_plan(job, lambda plan: True))
    if plan is None:
        return job
    if plan.gradient_accumulation_steps != job.plan.gradient_accumulation_steps:
        console().print(f"  planned again with that: {plan.why[0]}")
    return replace(job, plan=plan)


def _measure(job: Job) -> Collectives:
    """The seconds of each operation, the same on all ranks.

    Raises:
        RuntimeError: a rank has no memory left for it, or an operation failed.
    """
    device = local_device(job.plan.device, job.ranks.local_rank)
    tensors = _tensors(device, distributed.get_world_size())
    if not all_agree(tensors is not None) or tensors is None:
        raise RuntimeError("too little memory is free for it")
    limit_s = job.config.parallel.timeout_s
    if device.type == "cpu":
        limit_s = min(limit_s, GLOO_TIMEOUT_S)
    group = distributed.new_group(timeout=timedelta(seconds=limit_s))
    try:
        return Collectives(_curve(_all_reduce, tensors, group), _curve(_all_gather, tensors, group))
    finally:
        distributed.destroy_process_group(group)
        del tensors
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _tensors(device: torch.device, processes: int) -> Tensors | None:
    """A whole tensor of the largest size, and a process's part of one; None without the memory for them."""
    count = SIZES[-1] // 4 // processes
    try:
        return torch.zeros(count * processes, device=device), torch.zeros(count, device=device)
    except RuntimeError:
        return None


def _all_reduce(whole: torch.Tensor, part: torch.Tensor, group: Any) -> None:
    distributed.all_reduce(whole, group=group)


def _all_gather(whole: torch.Tensor, part: torch.Tensor, group: Any) -> None:
    distributed.all_gather_into_tensor(whole, part, group=group)


def _curve(run: Callable[[torch.Tensor, torch.Tensor, Any], None], tensors: Tensors, group: Any) -> Curve:
    """Seconds of the slowest rank by the bytes of the whole tensor, up to the size that takes too long."""
    whole, part = tensors
    seconds: list[float] = []
    for size in SIZES:
        count = size // 4 // group.size()
        tensors = whole[: count * group.size()], part[:count]
        slowest = torch.tensor([_least(run, tensors, group)], dtype=torch.float64, device=whole.device)
        distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX, group=group)
        seconds.append(slowest.item())
        if (1 + RUNS) * seconds[-1] * SIZES[1] / SIZES[0] > ENOUGH_S:
            break
    return Curve(SIZES[: len(seconds)], tuple(seconds))


def _least(run: Callable[[torch.Tensor, torch.Tensor, Any], None], tensors: Tensors, group: Any) -> float:
    """Seconds of the fastest of several runs after the first, which connects the processes."""

    def now() -> float:
        if tensors[0].is_cuda:
            torch.cuda.synchronize(tensors[0].device)
        return time.perf_counter()

    times = []
    for _ in range(1 + RUNS):
        began = now()
        run(*tensors, group)
        times.append(now() - began)
    return min(times[1:])
