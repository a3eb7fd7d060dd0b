"""The ranks of a launched run: their process group, how they agree, and what their communication costs."""

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

from sft_play.choices.engines import SEVERAL
from sft_play.engines.registry import engine_of
from sft_play.errors import LaunchError, first_line
from sft_play.job import Job, agreed_plan, find_plan, job_digest
from sft_play.launch.beats import Pulse, read_beats
from sft_play.launch.ranks import reports_folder, says_timeout
from sft_play.model.build import local_device
from sft_play.plan import Plan
from sft_play.planning.speed.devices import (
    SIZES,
    Collectives,
    device_name,
    read_collectives,
    write_collectives,
)
from sft_play.planning.speed.profile import Curve
from sft_play.spelling import var
from sft_play.ui.console import console, warn
from sft_play.ui.progress import spinner
from sft_play.units import counted, format_bytes, format_duration
from sft_play.upstream.accelerate import let_old_drivers_train

Value = TypeVar("Value")


@contextmanager
def process_group(job: Job) -> Iterator[None]:
    """Joins the process group for the duration of the block.

    A single process has none, unless its engine divides weights: then it is the only one of a group.

    If the block fails, the group is not destroyed: destroying it while other ranks still communicate would
    turn one rank's error into a hang of all.
    """
    engine = engine_of(job.plan.sharing.engine)
    on_gpu = job.plan.device == "cuda"
    if on_gpu:
        let_old_drivers_train()
    if job.plan.sharing.world_size == 1:
        with _group_of_one(job) if engine.shards_weights else nullcontext():
            yield
        return
    if job.ranks.is_main:
        engine.prepare_launch()
    if on_gpu:
        _require_own_gpu(job, torch.cuda.device_count())
        torch.cuda.set_device(local_device("cuda", job.ranks.local_rank))
    limit_s = job.config.parallel.timeout_s
    with suppress(OSError):  # where nothing can be written, whoever writes what counts says so
        Pulse(job.run, job.ranks.rank, limit_s, exits=False).load()
    distributed.init_process_group(_backend(job.plan), timeout=timedelta(seconds=limit_s))
    try:
        with engine.while_starting(_say if job.ranks.is_main else lambda text: None):
            yield
    except RuntimeError as error:
        if not says_timeout(str(error)):
            raise
        raise LaunchError(_standstill(job, error)) from error
    distributed.barrier()  # no rank leaves while another still waits for its last message
    distributed.destroy_process_group()


def _require_own_gpu(job: Job, visible: int) -> None:
    """Raises a LaunchError if a machine has more processes than GPUs that they see, of which each has one."""
    local = job.ranks.local_rank
    if local >= visible:
        raise LaunchError(
            f"process {job.ranks.rank} is number {local} of its machine (LOCAL_RANK, from 0) and sees "
            f"{counted(visible, 'GPU')}; start one process for each GPU, and let each process see all of them"
        )


@contextmanager
def _group_of_one(job: Job) -> Iterator[None]:
    engine = engine_of(job.plan.sharing.engine)
    engine.prepare_launch()
    distributed.init_process_group(_backend(job.plan), store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with engine.alone(), engine.while_starting(_say):
            yield
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def _backend(plan: Plan) -> str:
    """What the processes communicate through; what is offloaded is summed up where it is."""
    if plan.device == "cpu":
        return "gloo"
    return "cuda:nccl,cpu:gloo" if plan.sharing.offloads else "nccl"


def _say(text: str) -> None:
    console().print(f"  {text}")


def _standstill(job: Job, error: RuntimeError) -> str:
    """The message of a rank that timed out; the launcher then looks for the one that hangs."""
    beats = read_beats(job.run, range(job.plan.sharing.world_size))
    return "\n".join(
        [
            f"timed out after {job.config.parallel.timeout_s} s (parallel.timeout_s) waiting for the other "
            f"processes: {first_line(error)}",
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
    if job.plan.sharing.world_size == 1:
        return job
    return replace(job, plan=agreed_plan(from_all((job_digest(job), job.plan.to_json()))))


def agree_on_files(job: Job) -> Job:
    """Finds out whether all machines see the same run directory (`run.shared`); all ranks must call it.

    If they do not, each machine keeps its own checkpoints.

    Raises:
        LaunchError: some machines see the run directory of the main one and some do not; or none does, and
            each has but a part of the weights.
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
    engine = engine_of(job.plan.sharing.engine)
    if engine.shards_weights and not all(seen):
        whole = [var(ENGINE=row.name) for row in SEVERAL.values() if not row.shards_weights]
        raise LaunchError(
            f"{engine.label} over several machines needs a run directory that all of them share, since each "
            f"saves only a part of a checkpoint, but {job.run.path} is not shared: set output.dir to a "
            f"folder on a shared disk, or take {' or '.join(whole)}"
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


RUNS = 5  # of each operation and size; the fastest one counts
ENOUGH_S = 1.0  # a larger tensor is measured only if that is expected to take less
GLOO_TIMEOUT_S = 30  # NCCL ends the process after a timeout, so there it is that of the run


def with_known_exchange(job: Job) -> Job:
    """The job, planned again if what communication costs has just been measured; all ranks must call it.

    If it cannot be measured, the plan stays as it is.
    """
    count = job.plan.sharing.world_size
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
            problem = first_line(error)
        problems = [one for one in from_all(problem) if one]
    if problems or not found:
        warn(f"communication could not be measured: {problems[0]}")
        return job
    curve = found.all_reduce
    size, seconds = format_bytes(int(curve.sizes[-1])), format_duration(curve.seconds[-1])
    between = counted(count, "process")
    said = f"  measured between {between}, once: all-reduce of {size} in {seconds}"
    console().print(said, style="dim")
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
    if plan.batch.accumulation != job.plan.batch.accumulation:
        console().print(f"  planned again with that: {plan.why[0]}")
    return replace(job, plan=plan)


def _measure(job: Job) -> Collectives:
    """The seconds of each operation, the same on all ranks; they all need memory for it."""
    device = local_device(job.plan.device, job.ranks.local_rank)
    tensors = _tensors(device, distributed.get_world_size())
    if not all_agree(tensors is not None) or tensors is None:
        raise RuntimeError("too little memory is free for it")
    limit_s = job.config.parallel.timeout_s
    if device.type == "cpu":
        limit_s = min(limit_s, GLOO_TIMEOUT_S)
    group = distributed.new_group(timeout=timedelta(seconds=limit_s))
    try:
        reduced = _curve(distributed.all_reduce, tensors[:1], group)
        gathered = _curve(distributed.all_gather_into_tensor, tensors, group)
        return Collectives(reduced, gathered, _curve(_reduce_scatter, tensors, group))
    finally:
        distributed.destroy_process_group(group)
        del tensors
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _tensors(device: torch.device, processes: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """A whole tensor of the largest size, [processes x n], and a process's part of one, [n].

    None without the memory for them.
    """
    count = SIZES[-1] // 4 // processes
    try:
        return torch.zeros(count * processes, device=device), torch.zeros(count, device=device)
    except RuntimeError:
        return None


def _reduce_scatter(whole: torch.Tensor, part: torch.Tensor, group: object) -> None:
    distributed.reduce_scatter_tensor(part, whole, group=group)


def _curve(run: Callable[..., Any], tensors: Sequence[torch.Tensor], group: Any) -> Curve:
    """Seconds of the slowest rank by the bytes of the whole tensor, up to the size that takes too long."""
    whole, *parts = tensors
    seconds: list[float] = []
    for size in SIZES:
        count = size // 4 // group.size()
        used = [whole[: count * group.size()], *(part[:count] for part in parts)]
        slowest = torch.tensor([_least(run, used, group)], dtype=torch.float64, device=whole.device)
        distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX, group=group)
        seconds.append(slowest.item())
        if (1 + RUNS) * seconds[-1] * SIZES[1] / SIZES[0] > ENOUGH_S:
            break
    return Curve(SIZES[: len(seconds)], tuple(seconds))


def _least(run: Callable[..., Any], tensors: Sequence[torch.Tensor], group: object) -> float:
    """Seconds of the fastest of several runs after the first, which connects the processes; [n] each."""
    times = []
    for _ in range(1 + RUNS):
        began = now(tensors[0].device)
        run(*tensors, group=group)
        times.append(now(tensors[0].device) - began)
    return min(times[1:])


def now(device: torch.device) -> float:
    """The time in seconds, after all that a GPU was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
