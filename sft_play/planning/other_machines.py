"""The same run on other machines: on more or fewer processes, and on common GPUs in each tuning mode."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from sft_play.config.methods import METHODS
from sft_play.config.schema import RunConfig
from sft_play.engines.registry import engine_of
from sft_play.errors import ConfigError, DataError, DoesNotFitError, UntraceableModel
from sft_play.machine.gpus import Machine, what_if
from sft_play.plan import Plan
from sft_play.planning.batch import learning_rates
from sft_play.planning.clock import (
    batches_of,
    mean_micro_batch,
    messages_of,
    plan_clock,
    sent_bytes,
    sequence_messages,
)
from sft_play.planning.devices import training_threads
from sft_play.planning.drafts import with_groups, with_offload
from sft_play.planning.facts import DataFacts
from sft_play.planning.fewest import fewest_gpus, with_batch_for
from sft_play.planning.groups import plan_in_groups
from sft_play.planning.run import plan_run
from sft_play.planning.speed import collectives_of, links_of
from sft_play.sizing.architecture import AnyArchitecture
from sft_play.sizing.estimator import work_of_plans

SCALES = (1, 2, 4, 8)
MODES = tuple(METHODS)
# Names in configs/hardware.yaml, by memory.
COMMON_GPUS = (
    "RTX 3060", "T4", "A10", "L4", "RTX 3090", "RTX 4090", "RTX 5090", "A100 40GB", "L40S", "A100 80GB",
    "H100 80GB", "H200",
)  # fmt: skip


def scaling(
    config: RunConfig, model_config: AnyArchitecture, facts: DataFacts, machine: Machine, *, least: int = 1
) -> list[dict[str, Any]]:
    """The plan for 1, 2, 4 and 8 processes on devices like this machine's; `problem` if there is none.

    If `least` is more, for that many processes alone.

    `speed_up` is None if the link between devices is unknown; `speed_up_at_most` ignores communication.
    """
    rows: list[dict[str, Any]] = []
    base: float | None = None  # seconds of a sequence on the fewest devices
    reference: int | None = config.train.reference_batch_size
    for world in SCALES if least <= SCALES[-1] else (least,):
        try:
            plan = _plan_at_scale(config, model_config, facts, machine, world)
        except (ConfigError, DataError, DoesNotFitError) as error:
            rows.append({"world_size": world, "problem": str(error).splitlines()[0]})
            continue
        reference = reference or plan.batch.effective
        collectives = collectives_of(machine, world, plan.sharing.replicas)
        exchanged = alone = whole = None
        with contextlib.suppress(UntraceableModel):
            threads = training_threads(machine, world) or 1
            work_of = work_of_plans(model_config, batches_of(model_config, facts), threads)
            work = work_of(config, plan, mean_micro_batch(facts, plan).tokens)
            exchanged = sent_bytes(messages_of(work, config, plan), world, plan.sharing.replicas)
            exchanged += sent_bytes(sequence_messages(work, plan), plan.sharing.sequence_ranks)
            alone = plan_clock(model_config, facts, machine, world, link=False)(config, plan)
            if world == 1 or collectives:
                whole = plan_clock(model_config, facts, machine, world)(config, plan)
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
                "links": links_of(machine, world, plan.sharing.replicas),
                "exchange_measured": collectives is not None and collectives.measured,
                "speed_up": base / whole if base and whole else None,
                "speed_up_at_most": base / alone if base and alone else None,
            }
        )
    return rows


def _plan_at_scale(
    config: RunConfig, model_config: AnyArchitecture, facts: DataFacts, machine: Machine, world: int
) -> Plan:
    """The plan for `world` processes.

    Adapters use an engine that trades speed for memory only if no other fits: they leave little to partition.
    """
    if config.parallel.engine == "auto" and config.tuning.mode != "full":
        with contextlib.suppress(DoesNotFitError):
            return plan_run(config, model_config, facts, machine, world, accept=_keeps_speed, explain=False)
    return plan_run(config, model_config, facts, machine, world, explain=False)


def _keeps_speed(draft: Plan) -> bool:
    return not engine_of(draft.sharing.engine).trades_speed


def plans_by_gpu(
    config: RunConfig, model_config: AnyArchitecture, facts: DataFacts, modes: tuple[str, ...], **gpus: Any
) -> Iterator[dict[str, Any]]:
    """A row for each common GPU: name, memory, and `plans_by_mode`, which has the other arguments."""
    for name in COMMON_GPUS:
        plans = plans_by_mode(config, model_config, facts, name, modes, **gpus)
        yield {"gpu": name, "total_bytes": what_if(name).gpus[0].total_bytes, "plans": plans}


def plans_by_mode(
    config: RunConfig,
    model_config: AnyArchitecture,
    facts: DataFacts,
    gpu: str,
    modes: tuple[str, ...] = MODES,
    *,
    gpus: int | None = None,
    batch_grows: bool = True,
    accept: Callable[[Plan], bool] = lambda draft: True,
) -> dict[str, dict[str, Any]]:
    """The key numbers of the plan for each tuning mode, or why there is none.

    Args:
        config: the run.
        model_config: the architecture.
        facts: of the training rows.
        gpu: a name in configs/hardware.yaml.
        modes: of tuning.
        gpus: how many there are; default: the fewest that are enough.
        batch_grows: as in `fewest_gpus`.
        accept: as in `plan_in_groups`, of plans for so many `gpus`.
    """
    plans: dict[str, dict[str, Any]] = {}
    machine_of = partial(what_if, gpu)
    for mode in modes:
        tuning = config.tuning.model_copy(update={"mode": mode})
        run = with_offload(config.model_copy(update={"tuning": tuning}), "none")
        try:
            count = gpus or fewest_gpus(run, model_config, facts, machine_of, batch_grows=batch_grows) or 1
            run = run if gpus else with_batch_for(run, facts, count)
            machine = what_if(gpu, count)
            plan = plan_in_groups(run, model_config, facts, machine, count, accept=accept, explain=False)
        except (ConfigError, DoesNotFitError) as error:
            plans[mode] = {"problem": str(error).splitlines()[0]}
            continue
        plans[mode] = {
            "gpus": count,
            "effective_batch_size": plan.batch.effective,
            "micro_batch_size": plan.batch.micro,
            "sequence_ranks": plan.sharing.sequence_ranks,
            "gradient_checkpointing": plan.activations.recomputes,
            "engine": plan.sharing.engine,
            "peak_bytes": plan.memory.peak_bytes if plan.memory else None,
            "least_bytes": _least_bytes(
                with_groups(run, plan.sharing.sequence_ranks), model_config, facts, machine, plan
            ),
            "tokens_per_second": tokens_per_second(plan, facts),
            "gpu_hours": gpu_hours(plan) if facts.seen else None,
        }
    return plans


def _least_bytes(
    config: RunConfig, model_config: AnyArchitecture, facts: DataFacts, machine: Machine, chosen: Plan
) -> int | None:
    """The peak with micro-batch 1 and all activations recomputed, with the engine of the chosen plan.

    None if the memory is unknown; that of the chosen plan if the config allows no smaller one.
    """
    if chosen.memory is None:
        return None

    def smallest(draft: Plan) -> bool:
        saves = draft.activations.recomputes or config.train.gradient_checkpointing is False
        ours, theirs = draft.sharing, chosen.sharing
        same = (ours.engine, ours.offload) == (theirs.engine, theirs.offload)
        return same and saves and draft.batch.micro == 1

    least = None
    with contextlib.suppress(ConfigError, DoesNotFitError):
        least = plan_run(
            config,
            model_config,
            facts,
            machine,
            chosen.sharing.world_size,
            accept=smallest,
            explain=False,
            mix=False,
        ).memory
    return min(memory.peak_bytes for memory in (chosen.memory, least) if memory)


def gpu_hours(plan: Plan) -> float | None:
    """Predicted hours of the whole run, times its GPUs; None if the speed is unknown."""
    return (
        plan.step_seconds and plan.step_seconds * plan.schedule.total_steps * plan.sharing.world_size / 3600
    )


def tokens_per_second(plan: Plan, facts: DataFacts) -> float | None:
    """Predicted tokens per second over all devices, padding not counted; None if the speed is unknown."""
    tokens = facts.tokens_per_process(plan) * plan.sharing.world_size
    return tokens / plan.step_seconds if plan.step_seconds else None
