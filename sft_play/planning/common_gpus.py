"""What a run would be like on common GPUs: a plan for each of them and each tuning mode."""

from typing import Any

from sft_play.config.methods import METHODS
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, DoesNotFitError
from sft_play.machine.gpus import Machine, what_if
from sft_play.plan import Plan
from sft_play.planning.facts import DataFacts
from sft_play.planning.run import plan_run
from sft_play.sizing.architecture import AnyArchitecture

# Names in configs/hardware.yaml, by memory.
COMMON_GPUS = (
    "RTX 3060",
    "T4",
    "A10",
    "L4",
    "RTX 3090",
    "RTX 4090",
    "RTX 5090",
    "A100 40GB",
    "L40S",
    "A100 80GB",
    "H100 80GB",
    "H200",
)
MODES = tuple(METHODS)


def with_mode(config: RunConfig, mode: str) -> RunConfig:
    """The same run in another tuning mode."""
    return config.model_copy(update={"tuning": config.tuning.model_copy(update={"mode": mode})})


def plans_by_gpu(
    config: RunConfig,
    model_config: AnyArchitecture,
    facts: DataFacts,
    gpus: int = 1,
    modes: tuple[str, ...] = MODES,
) -> list[dict[str, Any]]:
    """A row for each common GPU: its name and memory, and for each mode the plan's key numbers.

    Args:
        config: the run.
        model_config: the architecture.
        facts: of the training rows.
        gpus: number of GPUs of the kind.
        modes: tuning modes to plan for.
    """
    rows = []
    for name in COMMON_GPUS:
        machine = what_if(name, gpus)
        plans = plans_by_mode(config, model_config, facts, machine, modes)
        rows.append({"gpu": name, "total_bytes": machine.gpus[0].total_bytes, "plans": plans})
    return rows


def plans_by_mode(
    config: RunConfig,
    model_config: AnyArchitecture,
    facts: DataFacts,
    machine: Machine,
    modes: tuple[str, ...] = MODES,
) -> dict[str, dict[str, Any]]:
    """The key numbers of the plan for each tuning mode on all GPUs of a machine, or why there is none."""
    plans: dict[str, dict[str, Any]] = {}
    for mode in modes:
        changed = with_mode(config, mode)
        try:
            plan = plan_run(changed, model_config, facts, machine, len(machine.gpus), explain=False)
            plans[mode] = _numbers(plan, facts)
        except (ConfigError, DoesNotFitError) as error:
            plans[mode] = {"problem": str(error).splitlines()[0]}
    return plans


def tokens_per_second(plan: Plan, facts: DataFacts) -> float | None:
    """Predicted tokens per second over all devices, padding not counted; None if the speed is unknown."""
    tokens = facts.tokens_per_process(plan) * plan.world_size
    return tokens / plan.step_seconds if plan.step_seconds else None


def _numbers(plan: Plan, facts: DataFacts) -> dict[str, Any]:
    return {
        "micro_batch_size": plan.micro_batch_size,
        "gradient_checkpointing": plan.recomputes,
        "engine": plan.engine,
        "peak_bytes": plan.memory.peak_bytes if plan.memory else None,
        "tokens_per_second": tokens_per_second(plan, facts),
    }
