"""What would make a run fit: single changes to it, each sized as the run that it gives. Pure."""

from collections.abc import Iterator
from dataclasses import replace

from sft_play.config.methods import lighter_modes
from sft_play.config.schema import RunConfig
from sft_play.engines.registry import distributed_engines
from sft_play.errors import ConfigError
from sft_play.plan import Estimator, Plan
from sft_play.reasons import Change
from sft_play.report.plan import process_unit
from sft_play.units import AUTOCAST, counted

Changed = tuple[str, RunConfig, Plan]  # the setting, and the config and plan that it gives


def helpful_changes(config: RunConfig, smallest: Plan, estimate: Estimator) -> tuple[Change, ...]:
    """What a process would need after each possible change to the smallest plan, cheapest change first."""
    found = []
    for what, changed_config, changed_plan in possible_changes(config, smallest):
        try:
            memory = estimate(changed_config, changed_plan)
        except ConfigError:  # this model or this machine does not allow it
            continue
        found.append(Change(what, memory.process_bytes, memory.fits))
    return tuple(found)


def possible_changes(config: RunConfig, plan: Plan) -> list[Changed]:
    """Changes that could make a run fit, cheapest first."""
    return [
        *_smaller_steps(config, plan),
        *_lighter_methods(config, plan),
        *_shorter_rows(config, plan),
        *_more_processes(config, plan),
    ]


def _smaller_steps(config: RunConfig, plan: Plan) -> Iterator[Changed]:
    if not plan.recomputes:
        yield "train.gradient_checkpointing=true", config, replace(plan, activations="recompute")
    if plan.rows_per_micro_batch > 1:
        one = plan.max_seq_len if plan.packing else 1
        smallest = replace(
            plan,
            micro_batch_size=one,
            micro_batch_tokens=plan.max_seq_len,
            gradient_accumulation_steps=-(-plan.rows_per_step // plan.world_size),
        )
        yield f"train.batch_size={one}", config, smallest


def _lighter_methods(config: RunConfig, plan: Plan) -> Iterator[Changed]:
    tuning, train = config.tuning, config.train
    if train.optimizer == "adamw":
        lighter = config.model_copy(update={"train": train.model_copy(update={"optimizer": "adamw_8bit"})})
        yield "train.optimizer=adamw_8bit", lighter, plan
    for mode in lighter_modes(tuning.mode, tuning.lora.init):
        changed = config.model_copy(update={"tuning": tuning.model_copy(update={"mode": mode})})
        dtype = AUTOCAST.get(plan.mixed_precision, plan.dtype)
        yield f"tuning.mode={mode}", changed, replace(plan, dtype=dtype)


def _shorter_rows(config: RunConfig, plan: Plan) -> Iterator[Changed]:
    for length in (plan.max_seq_len * 3 // 4, plan.max_seq_len // 2, plan.max_seq_len // 4):
        shorter = length // 64 * 64
        if shorter:
            unit = shorter if plan.packing else 1
            changed = replace(
                plan,
                max_seq_len=shorter,
                micro_batch_size=plan.rows_per_micro_batch * unit,
                effective_batch_size=plan.rows_per_step * unit,
                micro_batch_tokens=min(plan.micro_batch_tokens, plan.rows_per_micro_batch * shorter),
            )
            yield f"model.max_seq_len={shorter}", config, changed


def _more_processes(config: RunConfig, plan: Plan) -> Iterator[Changed]:
    unit = process_unit(plan.device)
    for engine in distributed_engines():
        if engine.trades_speed and engine.name != plan.engine and not engine.problem(config):
            for world in sorted({max(2, plan.world_size), 2 * plan.world_size, 4 * plan.world_size}):
                divided = replace(plan, engine=engine.name, world_size=world)
                yield f"{counted(world, unit)} with {engine.label}", config, divided
