"""Plans the same run for other numbers of processes."""

import contextlib
from typing import Any

from sft_play.config.schema import RunConfig
from sft_play.engines.registry import engine_of
from sft_play.errors import ConfigError, DataError, DoesNotFitError, UntraceableModel
from sft_play.machine.gpus import Machine
from sft_play.plan import Clock, Plan
from sft_play.planning.batch import learning_rates
from sft_play.planning.collectives import messages_of, sent_bytes
from sft_play.planning.devices import device_speed
from sft_play.planning.facts import DataFacts
from sft_play.planning.profiles import collectives_of
from sft_play.planning.run import plan_clock, plan_run
from sft_play.sizing.architecture import AnyArchitecture
from sft_play.sizing.estimator import work_of_plans

SCALES = (1, 2, 4, 8)


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
    return not engine_of(draft.engine).trades_speed


def scaling(
    config: RunConfig, model_config: AnyArchitecture, facts: DataFacts, machine: Machine
) -> list[dict[str, Any]]:
    """The plan for 1, 2, 4 and 8 processes on devices like this machine's; `problem` if there is none.

    `speed_up` is None if the link between devices is unknown; `speed_up_at_most` ignores communication.
    """
    rows: list[dict[str, Any]] = []
    base: float | None = None  # seconds of a sequence on the fewest devices
    reference: int | None = config.train.reference_batch_size
    for world in SCALES:
        try:
            plan = _plan_at_scale(config, model_config, facts, machine, world)
        except (ConfigError, DataError, DoesNotFitError) as error:
            rows.append({"world_size": world, "problem": str(error).splitlines()[0]})
            continue
        reference = reference or plan.effective_batch_size
        link = device_speed(machine, world).link_bandwidth
        collectives = collectives_of(machine, device_speed(machine, world), world)
        unlinked = plan_clock(model_config, facts, machine, world, link=False)
        alone = _seconds_per_sequence(unlinked, config, plan)
        whole = None
        if world == 1 or collectives:
            whole = _seconds_per_sequence(plan_clock(model_config, facts, machine, world), config, plan)
        base = base or whole or alone
        rows.append(
            {
                "world_size": world,
                "engine": plan.engine,
                "micro_batch_size": plan.micro_batch_size,
                "gradient_accumulation_steps": plan.gradient_accumulation_steps,
                "effective_batch_size": plan.effective_batch_size,
                "steps_per_epoch": plan.steps_per_epoch,
                "learning_rate": plan.learning_rate,
                "learning_rates": learning_rates(config.train, plan.effective_batch_size, reference),
                "lr_scaling": config.train.lr_scaling,
                "reference_batch_size": reference,
                "peak_bytes": plan.memory.peak_bytes if plan.memory else None,
                "process_bytes": plan.memory.process_bytes if plan.memory else None,
                "exchanged_bytes": _exchanged(model_config, facts, config, plan),
                "link_bytes_per_second": link,
                "exchange_measured": collectives is not None and collectives.measured,
                "speed_up": base / whole if base and whole else None,
                "speed_up_at_most": base / alone if base and alone else None,
            }
        )
    return rows


def _seconds_per_sequence(time: Clock, config: RunConfig, plan: Plan) -> float | None:
    try:
        seconds = time(config, plan)
    except UntraceableModel:
        return None
    return seconds / plan.effective_batch_size if seconds else None


def _exchanged(model_config: AnyArchitecture, facts: DataFacts, config: RunConfig, plan: Plan) -> int | None:
    """Bytes that each process sends per step; None for an architecture that cannot be traced."""
    try:
        work = work_of_plans(model_config, facts.eval_shape)(config, plan, facts.mean_tokens)
    except UntraceableModel:
        return None
    return sent_bytes(messages_of(work.trained_elements, config, plan), plan.world_size)
