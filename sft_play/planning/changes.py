"""Changes to a run that fits nowhere, alone and together, each with what a process would need then. Pure."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from typing import Any

from sft_play.config.methods import lighter_modes
from sft_play.config.schema import RunConfig
from sft_play.engines.base import Engine
from sft_play.engines.registry import chosen_engines, engine_of
from sft_play.errors import ConfigError
from sft_play.plan import Estimator, Memory, Plan
from sft_play.planning.batch import batch_for
from sft_play.reasons import Change, MasterWeights, Reason, StatesOnDisk
from sft_play.report.plan import process_unit
from sft_play.report.training import training_command
from sft_play.units import AUTOCAST, counted

MOST_TOGETHER = 3  # settings that are changed together
Changed = tuple[str, RunConfig, Plan]  # settings, and the config and plan that they give


def helpful_changes(config: RunConfig, smallest: Plan, estimate: Estimator) -> tuple[Change, ...]:
    """What a process would need after each change to the smallest plan that saves memory.

    Single changes, the one that costs least first; two or three together only where fewer are not enough.
    """
    assert smallest.memory
    now = smallest.memory
    found: list[Change] = []
    for number in range(1, MOST_TOGETHER + 1):
        for what, changed_config, changed_plan in _together(config, smallest, number):
            with suppress(ConfigError):  # this model or this machine does not allow it
                memory = estimate(changed_config, changed_plan)
                found.append(Change(what, memory.process_bytes, memory.fits, memory.host))
        if number == 1:
            found += _offloaded(config, smallest, estimate)
            found += _more_processes(config, smallest, estimate)
        if any(change.fits for change in found):
            break
    return tuple(each for each in found if each.fits or now.host or each.process_bytes < now.process_bytes)


def _together(config: RunConfig, plan: Plan, number: int) -> Iterator[Changed]:
    """So many changes at once, each of another kind."""
    kinds = (_recomputed, _one_row, _sixteen_bit, _smaller_states, _lighter_modes, _shorter_rows)
    for ways in combinations(kinds, number):
        found: list[Changed] = [("", config, plan)]
        for way in ways:
            found = [
                (f"{said} {what}".strip(), changed_config, changed_plan)
                for said, of, smaller in found
                for what, changed_config, changed_plan in way(of, smaller)
            ]
        yield from found


def _recomputed(config: RunConfig, plan: Plan) -> Iterator[Changed]:
    if not plan.recomputes:
        key = "gradient_checkpointing=true" if config.train.activations == "auto" else "activations=recompute"
        yield f"train.{key}", config, replace(plan, activations="recompute")
    asked = config.train.asked_activations != "auto"  # otherwise the search has tried it
    if asked and plan.activations == "recompute" and plan.device == "cuda":
        yield "train.activations=offload", config, replace(plan, activations="offload")


def _one_row(config: RunConfig, plan: Plan) -> Iterator[Changed]:
    if plan.rows_per_micro_batch > 1:
        one = plan.max_seq_len if plan.packing else 1
        smallest = replace(
            plan,
            micro_batch_size=one,
            micro_batch_tokens=plan.max_seq_len,
            gradient_accumulation_steps=-(-plan.rows_per_step // plan.data_ranks),
        )
        yield f"train.batch_size={one}", config, smallest


def _smaller_states(config: RunConfig, plan: Plan) -> Iterator[Changed]:
    train = config.train
    if train.optimizer == "adamw":
        lighter = config.model_copy(update={"train": train.model_copy(update={"optimizer": "adamw_8bit"})})
        if not engine_of(plan.engine).problem(lighter):
            yield "train.optimizer=adamw_8bit", lighter, plan


def _lighter_modes(config: RunConfig, plan: Plan) -> Iterator[Changed]:
    tuning = config.tuning
    for mode in lighter_modes(tuning.mode, tuning.lora.init):
        changed = config.model_copy(update={"tuning": tuning.model_copy(update={"mode": mode})})
        dtype = AUTOCAST.get(plan.mixed_precision, plan.dtype)
        yield f"tuning.mode={mode}", changed, replace(plan, dtype=dtype)


def _sixteen_bit(config: RunConfig, plan: Plan) -> Iterator[Changed]:
    if plan.dtype == "float32":
        yield from _other_dtype(config, plan)


def _other_dtype(config: RunConfig, plan: Plan) -> Iterator[Changed]:
    """Full fine-tuning in pure bf16 instead of with fp32 masters, or the other way round, if it can be.

    An engine that casts the model keeps fp32 masters of its own either way.
    """
    bf16 = plan.device == "cpu" or plan.mixed_precision == "bf16"
    if config.tuning.mode == "full" and bf16 and not engine_of(plan.engine).casts_model:
        dtype = "bfloat16" if plan.dtype == "float32" else "float32"
        changed = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
        yield f"model.dtype={dtype}", changed, replace(plan, dtype=dtype)


def master_weights(config: RunConfig, plan: Plan, estimate: Estimator) -> Iterator[Reason]:
    """What fp32 masters cost, or pure bf16 saves: the same plan in the other type is sized."""
    for _, changed_config, changed_plan in _other_dtype(config, plan):
        other = estimate(changed_config, changed_plan, complete=True)
        masters, pure = (plan.memory, other) if plan.dtype == "float32" else (other, plan.memory)
        dtype: Any = plan.dtype
        assert masters and pure
        if masters.host and pure.host:
            yield MasterWeights(dtype, masters.host.needed_bytes - pure.host.needed_bytes, "RAM")
        else:
            yield MasterWeights(dtype, masters.process_bytes - pure.process_bytes)


def states_on_disk(config: RunConfig, plan: Plan, estimate: Estimator) -> Iterator[Reason]:
    """What `parallel.nvme_path` saves: the same plan without it is sized."""
    folder = config.parallel.nvme_path
    if folder and plan.memory:
        parallel = config.parallel.model_copy(update={"nvme_path": None})
        kept = estimate(config.model_copy(update={"parallel": parallel}), plan, complete=True)
        yield StatesOnDisk(folder, _ram(kept) - _ram(plan.memory))


def _ram(memory: Memory) -> int:
    """What the processes need of a machine's RAM; of a CPU, what one needs."""
    return memory.host.needed_bytes if memory.host else memory.process_bytes


def _offloaded(config: RunConfig, plan: Plan, estimate: Estimator) -> Iterator[Change]:
    """For each engine that offloads, what a process and its machine need then."""
    if plan.offload != "none" or plan.device == "cpu" or plan.mixed_precision == "fp16":
        return
    for engine in chosen_engines():
        for place in engine.offloads if not engine.problem(config) else ():
            changed = replace(plan, engine=engine.name, offload=place, replicas=1)
            with suppress(ConfigError):
                memory = estimate(config, changed)
                what = f"offload to {place.upper()} ({training_command(changed)})"
                yield Change(what, memory.process_bytes, memory.fits, memory.host)


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


def fewest(counts: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The first of ascending counts that fits, if each larger one fits too; None if none does.

    Not every count is tried: where weights are divided, each takes a trace of its own.
    """
    place = bisect_left(counts, True, key=fits)
    return counts[place] if place < len(counts) else None


def _more_processes(config: RunConfig, plan: Plan, estimate: Estimator) -> Iterator[Change]:
    """For each engine that saves memory, the fewest processes that are enough, or the most of those tried."""
    least = max(2, plan.world_size)
    for engine in chosen_engines():
        own = engine.name == plan.engine
        if engine.trades_speed and not engine.problem(config) and (engine.shards_weights or not own):
            counts = [least * times for times in (1, 2, 4, 8) if not own or times > 1]
            with suppress(ConfigError):
                yield _fewest_processes(config, plan, engine, counts, estimate)


def _fewest_processes(
    config: RunConfig, plan: Plan, engine: Engine, counts: list[int], estimate: Estimator
) -> Change:
    sized: dict[int, Memory] = {}

    def fits(world: int) -> bool:
        more = replace(plan, engine=engine.name, world_size=world, replicas=1, offload="none")
        sized[world] = estimate(config, more)
        return sized[world].fits

    world = fewest(counts, fits) or max(sized)
    batch = batch_for(config.train, world // plan.sequence_ranks, plan.max_seq_len if plan.packing else 1)
    settings = [f"train.effective_batch_size={batch}"] if batch else []
    chosen = replace(plan, engine=engine.name, world_size=world, offload="none")
    typed = training_command(chosen, overrides=settings)
    what = f"{counted(world, process_unit(plan.device))} with {engine.label} ({typed})"
    return Change(what, sized[world].process_bytes, sized[world].fits)
