"""The plan of a run that goes on: the one with which it began, if it fits, so that sums are rounded alike."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from sft_play.config.schema import RunConfig
from sft_play.engines.registry import engine_of
from sft_play.errors import ConfigError, DoesNotFitError
from sft_play.plan import Plan
from sft_play.planning.planner import fastest_plan
from sft_play.planning.request import Request, Settings
from sft_play.runlog import continued_run, read_json


def earlier_plan(config: RunConfig, run: Path) -> Plan | None:
    """The plan of what `train.resume` may go on with; None if there is none that this version can read."""
    folder = continued_run(run, config.train.resume)
    if folder is None or not (folder / "plan.json").is_file():
        return None
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        return Plan.from_json(read_json(folder / "plan.json"))
    return None


def resumed_plan(request: Request, earlier: Plan) -> Plan | None:
    """A plan that computes as an earlier one did; None if it does not fit, or is not allowed any more.

    A plan with which memory has run out does not fit.
    """
    again = request.in_groups_as(earlier.sharing).changed(_ways_of(earlier, request.config))
    try:
        plan = fastest_plan(again, lambda draft: _kept(draft) == _kept(earlier))
    except (DoesNotFitError, ConfigError):
        return None
    if plan.memory and plan.memory.ran_out:
        return None
    return replace(plan, kernels_origin=earlier.kernels_origin)


def _kept(plan: Plan) -> list[Any]:
    """What the order of sums and the kernels depend on."""
    return [
        replace(plan.sharing, defers_exchange=False, reshard_after_forward=True),
        (plan.batch.micro, plan.batch.accumulation, plan.rows.packing, plan.rows.joined),
        plan.activations.uniform,
        (plan.precision, plan.kernels, plan.device, plan.compute_capability),
    ]


def _ways_of(earlier: Plan, asked: RunConfig) -> Settings:
    """Kernels, and ways to send less, that an earlier plan chose, where they are left to the plan."""
    engine, sharing, parallel = engine_of(earlier.sharing.engine), earlier.sharing, asked.parallel
    ways: dict[str, tuple[object, object]] = {
        "train.kernels": (asked.train.kernels, earlier.kernels.layers),
        "train.compile": (asked.train.compile, earlier.kernels.compiled),
    }
    if engine.can_keep_gathered:
        ways["parallel.reshard_after_forward"] = parallel.reshard_after_forward, sharing.reshard_after_forward
    if engine.can_defer:
        ways["parallel.defer_exchange"] = parallel.defer_exchange, sharing.defers_exchange
    return {name: found for name, (wanted, found) in ways.items() if wanted == "auto"}
