"""Which plan to take: of those that fit the budget the fastest, by prediction; if none fits, what would.

Pure: memory and speed come in as functions, so that traced, measured and made-up numbers are interchangeable.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from sft_play.config.schema import RunConfig
from sft_play.errors import DoesNotFitError
from sft_play.sizing.planner import Memory, Plan
from sft_play.units import format_bytes

Estimator = Callable[[RunConfig, Plan], Memory]
Clock = Callable[[RunConfig, Plan], float | None]  # seconds of an optimizer step; None if the device's speed is not known

PLATEAU = 0.97  # a smaller micro-batch is taken if it is this fast: unused memory costs nothing, running out costs the run
UNUSED_WORTH_A_WORD = 0.2


def fits(memory: Memory) -> bool:
    """Whether the peak, with the allocator's gaps, stays within the budget."""
    return memory.needed_bytes <= memory.budget_bytes


def choose_plan(config: RunConfig, drafts: list[Plan], estimate: Estimator | None, clock: Clock | None) -> Plan:
    """The plan to run.

    Args:
        config: the run.
        drafts: what the config allows, preferred order first (`planner.draft_plans`).
        estimate: memory of a plan; None when the model cannot be traced.
        clock: time of a step.

    Raises:
        DoesNotFitError: no draft fits; says by how much, and what would.
    """
    if estimate is None:
        return _without_estimate(drafts)
    sized = _size_all(config, drafts, estimate, clock)
    able = [plan for plan in sized if plan.memory and fits(plan.memory)]
    if not able:
        raise DoesNotFitError(explain_misfit(config, min(sized, key=_peak), estimate))
    chosen, seconds = _fastest(config, able, clock)
    return replace(
        chosen, why=_reasons(config, chosen, able, seconds), alternatives=_alternatives(config, chosen, sized, clock)
    )


def _peak(plan: Plan) -> int:
    assert plan.memory
    return plan.memory.needed_bytes


def _size_all(config: RunConfig, drafts: list[Plan], estimate: Estimator, clock: Clock | None) -> list[Plan]:
    """Drafts with their memory. Where no more memory is of use, the engines that come later only show what they would save."""
    sized: list[Plan] = []
    for engine in dict.fromkeys(draft.engine for draft in drafts):
        best = _unbeaten(config, drafts, sized, clock)
        candidates = [draft for draft in drafts if draft.engine == engine and (best is None or _cut_alike(draft, best))]
        sized += _size_engine(config, candidates, estimate)
    return sized


def _size_engine(config: RunConfig, drafts: list[Plan], estimate: Estimator) -> list[Plan]:
    """Once a micro-batch does not fit, larger ones of the same kind are not looked at."""
    sized: list[Plan] = []
    full: set[bool] = set()
    for draft in drafts:
        if draft.gradient_checkpointing not in full:
            memory = estimate(config, draft)
            sized.append(replace(draft, memory=memory))
            if not fits(memory):
                full.add(draft.gradient_checkpointing)
    return sized


def _cut_alike(one: Plan, other: Plan) -> bool:
    return (one.micro_batch_size, one.gradient_checkpointing) == (other.micro_batch_size, other.gradient_checkpointing)


def _unbeaten(config: RunConfig, drafts: list[Plan], sized: list[Plan], clock: Clock | None) -> Plan | None:
    """The fastest that fits so far, if more memory would not make it faster: engines that save some need no search then."""
    able = [plan for plan in sized if plan.memory and fits(plan.memory)]
    if not able or clock is None:
        return None
    best, seconds = _fastest(config, able, clock)
    on_plateau = any(plan.micro_batch_size > best.micro_batch_size for plan in able)
    largest = best.micro_batch_size == max(draft.micro_batch_size for draft in drafts)
    could_keep = best.gradient_checkpointing and not all(draft.gradient_checkpointing for draft in drafts)
    return best if seconds and (on_plateau or largest) and not could_keep else None


def _without_estimate(drafts: list[Plan]) -> Plan:
    asked = len({draft.micro_batch_size for draft in drafts}) == 1
    reason = (
        "micro-batch as the config says" if asked else "the smallest micro-batch, since this model's memory cannot be predicted"
    )
    return replace(drafts[0], why=(batch_sentence(drafts[0]), reason, *drafts[0].why))


def _fastest(config: RunConfig, able: list[Plan], clock: Clock | None) -> tuple[Plan, float | None]:
    """The smallest micro-batch on the plateau of the fastest; the first in preferred order where speed is not known."""
    times = [clock(config, plan) if clock else None for plan in able]
    if any(time is None for time in times):
        return able[0], None
    best = min(time for time in times if time is not None)
    near = [(plan, time) for plan, time in zip(able, times, strict=True) if time is not None and best >= PLATEAU * time]
    return min(near, key=lambda pair: (pair[0].micro_batch_size, pair[1]))


def batch_sentence(plan: Plan) -> str:
    """The contract, in words."""
    words = "tokens" if plan.packing else "sequences"
    processes = "process" if plan.world_size == 1 else "processes"
    return (
        f"effective batch {plan.effective_batch_size} {words} = micro-batch {plan.micro_batch_size} x accumulation "
        f"{plan.gradient_accumulation_steps} x {plan.world_size} {processes}"
    )


def _reasons(config: RunConfig, chosen: Plan, able: list[Plan], seconds: float | None) -> tuple[str, ...]:
    memory = chosen.memory
    assert memory
    reasons = [batch_sentence(chosen)]
    larger = [plan for plan in able if plan.micro_batch_size > chosen.micro_batch_size]
    if larger:
        largest = max(plan.micro_batch_size for plan in larger)
        why = f"up to {largest} would fit and is predicted less than 3% faster" if seconds else f"up to {largest} would fit"
        reasons.append(f"micro-batch {chosen.micro_batch_size}: {why}")
    else:
        reasons.append(f"micro-batch {chosen.micro_batch_size}: the largest that fits or divides the effective batch")
    reasons.append(_checkpointing_reason(config, chosen, able))
    reasons.append(engine_sentence(chosen, able))
    unused = 1 - memory.peak_bytes / memory.budget_bytes
    if larger and unused > UNUSED_WORTH_A_WORD:
        reasons.append(f"{unused:.0%} of the budget stays free: a larger micro-batch would not be faster")
    return (*reasons, *chosen.why)


def _checkpointing_reason(config: RunConfig, chosen: Plan, able: list[Plan]) -> str:
    if config.train.gradient_checkpointing != "auto":
        return (
            f"activations are {'recomputed (checkpointing)' if chosen.gradient_checkpointing else 'kept'}, as the config says"
        )
    both = {plan.gradient_checkpointing for plan in able}
    if not chosen.gradient_checkpointing:
        return "activations are kept: they fit, and recomputing them would cost about a third more compute"
    if both == {True}:
        return "activations are recomputed in the backward pass (checkpointing): kept, they would not fit"
    return "activations are recomputed in the backward pass (checkpointing): predicted faster, since larger micro-batches fit"


def engine_sentence(chosen: Plan, sized: Iterable[Plan]) -> str:
    """What the engine does for this run's memory, against the other one where both were looked at."""
    if chosen.world_size == 1:
        return "one process: nothing to share"
    other = [plan for plan in sized if plan.engine != chosen.engine and _cut_alike(plan, chosen)]
    name = {"ddp": "DDP", "deepspeed_z2": "ZeRO-2"}
    if not other:
        return f"{name[chosen.engine]} over {chosen.world_size} processes"
    saved = _peak(other[0]) - _peak(chosen)
    if chosen.engine == "ddp":
        what = f"ZeRO-2 would save {format_bytes(-saved)}" if saved < 0 else f"ZeRO-2 would need {format_bytes(saved)} more"
        return (
            f"DDP over {chosen.world_size} processes: each holds the whole model, so more of them do not lower the peak; {what}"
        )
    return (
        f"ZeRO-2 over {chosen.world_size} processes: shares optimizer state and gradients, {format_bytes(saved)} less than DDP"
    )


def _alternatives(config: RunConfig, chosen: Plan, sized: list[Plan], clock: Clock | None) -> tuple[dict[str, Any], ...]:
    """The best plan of each other kind, with what it costs."""
    base = clock(config, chosen) if clock else None
    rows: dict[tuple[str, bool], dict[str, Any]] = {}
    for plan in sized:
        kind = (plan.engine, plan.gradient_checkpointing)
        if kind == (chosen.engine, chosen.gradient_checkpointing) and plan.micro_batch_size <= chosen.micro_batch_size:
            continue
        time = clock(config, plan) if clock else None
        row = {
            "micro_batch_size": plan.micro_batch_size,
            "gradient_accumulation_steps": plan.gradient_accumulation_steps,
            "gradient_checkpointing": plan.gradient_checkpointing,
            "engine": plan.engine,
            "peak_bytes": _peak(plan),
            "fits": plan.memory is not None and fits(plan.memory),
            "relative_speed": base / time if base and time else None,
        }
        held = rows.get(kind)
        if held is None or (row["fits"], row["relative_speed"] or 0) > (held["fits"], held["relative_speed"] or 0):
            rows[kind] = row
    return tuple(sorted(rows.values(), key=lambda row: (not row["fits"], -(row["relative_speed"] or 0))))


def remedies(config: RunConfig, plan: Plan) -> list[tuple[str, RunConfig, Plan]]:
    """Changes that could make a run fit, cheapest first: what to write, and the config and plan it leads to."""
    tuning, train = config.tuning, config.train
    found: list[tuple[str, RunConfig, Plan]] = []
    if not plan.gradient_checkpointing:
        found.append(("train.gradient_checkpointing=true", config, replace(plan, gradient_checkpointing=True)))
    if plan.rows_per_micro_batch > 1:
        one = plan.max_seq_len if plan.packing else 1
        accumulation = plan.gradient_accumulation_steps * plan.rows_per_micro_batch
        found.append(
            (f"train.batch_size={one}", config, replace(plan, micro_batch_size=one, gradient_accumulation_steps=accumulation))
        )
    if train.optimizer == "adamw":
        lighter = config.model_copy(update={"train": train.model_copy(update={"optimizer": "adamw_8bit"})})
        found.append(("train.optimizer=adamw_8bit", lighter, plan))
    for mode in {"full": ["lora", "qlora"], "lora": ["qlora"], "qlora": []}[tuning.mode]:
        changed = config.model_copy(update={"tuning": tuning.model_copy(update={"mode": mode})})
        dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(plan.mixed_precision, plan.dtype)
        found.append((f"tuning.mode={mode}", changed, replace(plan, dtype=dtype)))
    for length in (plan.max_seq_len * 3 // 4, plan.max_seq_len // 2, plan.max_seq_len // 4):
        shorter = length // 64 * 64
        if shorter:
            micro = plan.rows_per_micro_batch * (shorter if plan.packing else 1)
            found.append((f"model.max_seq_len={shorter}", config, replace(plan, max_seq_len=shorter, micro_batch_size=micro)))
    if plan.engine != "deepspeed_z2":
        for world in sorted({max(2, plan.world_size), 2 * plan.world_size, 4 * plan.world_size}):
            found.append((f"{world} GPUs with ZeRO-2", config, replace(plan, engine="deepspeed_z2", world_size=world)))
    return found


def explain_misfit(config: RunConfig, smallest: Plan, estimate: Estimator) -> str:
    """What is over by how much, and the single changes that would make it fit."""
    memory = smallest.memory
    assert memory
    over = memory.needed_bytes - memory.budget_bytes
    lines = [
        f"this run does not fit: the smallest plan (micro-batch {smallest.micro_batch_size}"
        f"{', checkpointing' if smallest.gradient_checkpointing else ''}) needs {format_bytes(memory.needed_bytes)} "
        f"in its {memory.peak_phase} phase, the budget is {format_bytes(memory.budget_bytes)}: {format_bytes(over)} too much",
    ]
    terms = sorted(memory.terms.items(), key=lambda item: -item[1])[:4]
    lines.append("largest parts: " + ", ".join(f"{name} {format_bytes(size)}" for name, size in terms if size))
    helps: list[tuple[int, str]] = []
    partial: list[tuple[int, str]] = []
    for what, changed_config, changed_plan in remedies(config, smallest):
        after = estimate(changed_config, changed_plan)
        line = f"  {what}: {format_bytes(after.needed_bytes - memory.needed_bytes)}, peak {format_bytes(after.needed_bytes)}"
        (helps if fits(after) else partial).append((after.needed_bytes, line))
    if helps:
        lines += ["each of these alone makes it fit:", *(line for _, line in helps)]
    else:
        lines += ["no single change is enough; the most help:", *(line for _, line in sorted(partial)[:4])]
    return "\n".join(lines)
