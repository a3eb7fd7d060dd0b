"""The same run on other machines: the fewest GPUs, other numbers of processes, common GPUs in each mode."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from itertools import dropwhile
from typing import Any

from sft_play.config.methods import METHODS
from sft_play.engines.registry import engine_of
from sft_play.errors import ConfigError, DataError, DoesNotFitError, UntraceableModel
from sft_play.machine.gpus import what_if
from sft_play.machine.links import links_of
from sft_play.machine.prices import price_of
from sft_play.plan import Plan
from sft_play.planning.allowed import leanest_memories, leanest_that_may_fit
from sft_play.planning.candidates.batch import learning_rates
from sft_play.planning.planner import Accept, every, fastest_plan, groups_may_help, sizes_of_groups
from sft_play.planning.request import Request
from sft_play.planning.speed.clock import (
    mean_micro_batch,
    messages_of,
    plan_clock,
    sent_bytes,
    sequence_messages,
    work_of_request,
)
from sft_play.planning.speed.devices import collectives_of

SCALES = (1, 2, 4, 8)
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # of GPUs
PADDED = 1.1  # of the weights: up to this, more GPUs never need more memory
MODES = tuple(METHODS)
# Names in configs/hardware.yaml, by memory.
COMMON_GPUS = (
    "RTX 3060", "T4", "A10", "L4", "RTX 3090", "RTX 4090", "RTX 5090", "A100 40GB", "L40S", "A100 80GB",
    "H100 80GB", "H200",
)  # fmt: skip


def fewest_gpus(request: Request, *, batch_grows: bool, least: int = 1) -> int | None:
    """How many GPUs are enough, in groups that divide tokens if need be; None if not even 512 are.

    There are `least` or more; if the batch grows, it becomes as large as the number of GPUs that need it.

    Raises:
        ConfigError: settings contradict each other, the model or the GPU.
    """
    config = request.config

    def run(count: int) -> Request:
        return request.with_batch_for(count).with_offload("none").on_gpus(count)

    @cache
    def fits(count: int) -> bool:
        tried = run(count)
        return _fits_whole(tried.in_groups_of(config.parallel.sequence_ranks)) or fits_in_groups(tried)

    counts = [n for n in COUNTS if n >= least and n % config.parallel.sequence_ranks == 0]
    allowed = [n for n in counts if batch_grows or request.with_batch_for(n) is request]
    allowed = [*dropwhile(lambda n: not leanest_that_may_fit(run(n)), allowed)]
    found = _first(allowed, fits)
    if found or not allowed or request.architecture.modules.padded_share(allowed[-1]) <= PADDED:
        return found
    return next(filter(fits, allowed), None)


def _fits_whole(request: Request) -> bool:
    """Whether some plan fits whose rows stay whole: the leanest one does, then."""
    try:
        return any(memory.within_budget for memory in leanest_memories(request))
    except UntraceableModel:
        return True  # for the probe to find out


def fits_in_groups(request: Request) -> bool:
    """Whether a run whose whole rows do not fit does if the largest groups divide their tokens."""
    if sizes := sizes_of_groups(request):
        with suppress(ConfigError, UntraceableModel):
            return groups_may_help(request, sizes[-1]) and any(
                memory.fits for memory in leanest_memories(request.in_groups_of(sizes[-1]))
            )
    return False


def _first(counts: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The first of ascending counts that fits, if each larger one fits too; None if none does.

    Not every count is tried: where weights are divided, each takes a trace of its own. Most that fit at all
    fit the first or second, of which fewer are known not to hold the weights.
    """
    if not counts or fits(counts[0]):
        return next(iter(counts), None)
    if not fits(counts[-1]):
        return None
    second = counts[1]
    return second if fits(second) else counts[bisect_left(counts, True, 2, len(counts) - 1, key=fits)]


def scaling(request: Request, *, least: int = 1) -> list[dict[str, Any]]:
    """The plan for 1, 2, 4 and 8 processes on devices like this machine's; `problem` if there is none.

    If `least` is more, for that many processes alone.

    `speed_up` is None if the link between devices is unknown; `speed_up_at_most` ignores communication.
    """
    rows: list[dict[str, Any]] = []
    base: float | None = None  # seconds of a sequence on the fewest devices
    config, machine = request.config, request.machine
    reference: int | None = config.train.reference_batch_size
    for world in SCALES if least <= SCALES[-1] else (least,):
        run = request.changed(processes=world, machines=None)
        try:
            plan = _plan_at_scale(run)
        except (ConfigError, DataError, DoesNotFitError) as error:
            rows.append({"world_size": world, "problem": str(error).splitlines()[0]})
            continue
        reference = reference or plan.batch.effective
        collectives = collectives_of(machine, world, plan.sharing.replicas)
        exchanged = alone = whole = None
        with suppress(UntraceableModel):
            work = work_of_request(run)(config, plan, mean_micro_batch(run.facts, plan).tokens)
            exchanged = sent_bytes(messages_of(work, config, plan), world, plan.sharing.replicas)
            exchanged += sent_bytes(sequence_messages(work, plan), plan.sharing.sequence_ranks)
            alone = plan_clock(run, link=False)(config, plan)
            if world == 1 or collectives:
                whole = plan_clock(run)(config, plan)
        alone, whole = (seconds and seconds / plan.batch.effective for seconds in (alone, whole))
        base = base or whole or alone
        rows.append(
            {
                "world_size": world,
                "engine": plan.sharing.engine,
                "micro_batch_size": plan.batch.micro,
                "gradient_accumulation_steps": plan.batch.accumulation,
                "effective_batch_size": plan.batch.effective,
                "steps_per_epoch": plan.schedule.steps_per_epoch,
                "learning_rate": plan.schedule.learning_rate,
                "learning_rates": learning_rates(config.train, plan.batch.effective, reference),
                "lr_scaling": config.train.lr_scaling,
                "reference_batch_size": reference,
                "peak_bytes": plan.memory.peak_bytes if plan.memory else None,
                "process_bytes": plan.memory.process_bytes if plan.memory else None,
                "exchanged_bytes": exchanged,
                "links": [link.slowest for link in links_of(machine, world, plan.sharing.replicas)],
                "exchange_measured": collectives is not None and collectives.measured,
                "speed_up": base / whole if base and whole else None,
                "speed_up_at_most": base / alone if base and alone else None,
            }
        )
    return rows


def _plan_at_scale(request: Request) -> Plan:
    """The plan, whose adapters use an engine that trades speed for memory only if no other fits.

    They leave little to partition.
    """
    if request.config.parallel.engine == "auto" and request.config.tuning.mode != "full":
        with suppress(DoesNotFitError):
            return fastest_plan(
                request, lambda draft: not engine_of(draft.sharing.engine).trades_speed, explain=False
            )
    return fastest_plan(request, explain=False)


def on_each_gpu(request: Request) -> dict[str, Request]:
    """The request on one of each common GPU, by its name."""
    return {name: request.changed(machine=what_if(name)) for name in COMMON_GPUS}


def plans_by_mode(
    request: Request,
    modes: Sequence[str] = MODES,
    count: int | None = None,
    *,
    batch_grows: bool = True,
    accept: Accept = every,
) -> dict[str, dict[str, Any]]:
    """The key numbers of the plan for each tuning mode, or why there is none.

    For `count` GPUs like the request's, or the fewest that are enough; `batch_grows` as in `fewest_gpus`, and
    `accept` as in `fastest_plan`.
    """
    plans: dict[str, dict[str, Any]] = {}
    for mode in modes:
        run = request.changed({"tuning.mode": mode}).with_offload("none")
        try:
            gpus = count or fewest_gpus(run, batch_grows=batch_grows) or 1
            run = (run if count else run.with_batch_for(gpus)).on_gpus(gpus)
            plan = fastest_plan(run, accept, explain=False)
        except (ConfigError, DoesNotFitError) as error:
            plans[mode] = {"problem": str(error).splitlines()[0]}
            continue
        plans[mode] = {
            "gpus": gpus,
            "effective_batch_size": plan.batch.effective,
            "micro_batch_size": plan.batch.micro,
            "sequence_ranks": plan.sharing.sequence_ranks,
            "gradient_checkpointing": plan.activations.recomputes,
            "engine": plan.sharing.engine,
            "replicas": plan.sharing.replicas,
            "peak_bytes": plan.memory.peak_bytes if plan.memory else None,
            "tokens_per_second": run.facts.tokens_per_second(plan),
            "step_seconds": plan.step_seconds,
            "step_seconds_range": plan.step_seconds_range,
            "step_seconds_range_reason": plan.step_seconds_range_reason,
            "hours": run_hours(plan),
            "gpu_hours": (spent := gpu_hours(plan) if run.facts.seen else None),
            "cost": cost_at(price_of(request.machine.gpus[0].name), spent),
        }
    return plans


def run_hours(plan: Plan) -> float | None:
    """Predicted hours of the whole run; None if the speed is unknown."""
    return plan.step_seconds and plan.step_seconds * plan.schedule.total_steps / 3600


def cost_at(price: float | None, hours: float | None) -> float | None:
    """Of a run at a price of a GPU for an hour, in the currency of the price; None if one is unknown."""
    return None if price is None or hours is None else price * hours


def gpu_hours(plan: Plan) -> float | None:
    """The same, times its GPUs."""
    hours = run_hours(plan)
    return hours and hours * plan.sharing.world_size
