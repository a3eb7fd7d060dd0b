"""The search for the plan that is predicted to be fastest among those that fit the memory budget.

The drafts come in preferred order: engine by engine, without checkpointing before with it, small
micro-batches before large ones. Sizing a draft (calling the estimator) is the expensive part, so the search
avoids it where the answer is known:

- Memory grows with the micro-batch. Once a micro-batch does not fit, no larger one of that engine and
  checkpointing setting is sized.
- Recomputing activations only costs time where they fit. With checkpointing, micro-batches are sized that do
  not fit without it, and the chosen one, to report what checkpointing would save.
- Some engines trade speed for memory. If the best plan of an engine before them would not become faster with
  more memory, they are sized for that plan only, to report what they would save.

Among the plans that fit, the one with the shortest predicted step is chosen; plans within 1% of it (`TIE`)
count as a tie, which the larger micro-batch wins. A plan with which memory ran out in an earlier run counts
as one that does not fit, unless no other is left: then the prediction counts, and of several plans the one
that needs least is chosen. If no plan fits, the error lists single changes to the config that would make the
smallest one fit.

Pure: memory and time are functions, so traced, measured and made-up numbers are interchangeable.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from sft_play.config.methods import lighter_modes
from sft_play.config.schema import RunConfig
from sft_play.engines.registry import distributed_engines, engine_of
from sft_play.errors import ConfigError, DoesNotFitError
from sft_play.plan import Clock, Estimator, Plan
from sft_play.planning.sentences import batch_sentence, dealing_sentence
from sft_play.units import AUTOCAST, format_bytes

# Predictions that differ by less are a tie, which the larger micro-batch wins: it needs fewer passes.
TIE = 0.01


def choose_plan(
    config: RunConfig,
    drafts: list[Plan],
    estimate: Estimator | None,
    clock: Clock | None,
    *,
    explain: bool = True,
) -> Plan:
    """The plan to run.

    Args:
        config: the run's config.
        drafts: the plans that the config allows, in preferred order (`drafts.draft_plans`).
        estimate: predicts the memory of a plan; None if the model cannot be traced.
        clock: predicts the time of a step; None if unknown.
        explain: also size what is only reported: the chosen plan with activations recomputed, and changes
            that would help if no draft fits.

    Raises:
        DoesNotFitError: no draft fits; the message says by how much, and which changes would help.
    """
    if estimate is None:
        return _without_estimate(drafts)
    sized = _size_all(config, drafts, estimate, clock)
    while fitting := _fitting(sized) or _least_of_those_that_ran_out(sized):
        fastest, seconds = _pick_fastest(config, fitting, clock)
        memory = estimate(config, fastest, complete=True)
        chosen = replace(fastest, memory=memory)
        sized[sized.index(fastest)] = chosen
        if memory.within_budget:  # with its fragmentation, which the search leaves out where it is small
            break
    else:
        smallest = min(sized, key=_needed)
        raise DoesNotFitError(explain_misfit(config, smallest, estimate) if explain else _misfit(smallest))
    if explain:
        sized += _recomputed(config, chosen, drafts, sized, estimate)
    return replace(
        chosen,
        step_seconds=seconds,
        why=_reasons(config, chosen, sized, seconds),
        alternatives=_alternative_rows(config, chosen, sized, clock),
    )


def _fitting(sized: list[Plan]) -> list[Plan]:
    return [plan for plan in sized if plan.memory and plan.memory.fits]


def _least_of_those_that_ran_out(sized: list[Plan]) -> list[Plan]:
    within = [plan for plan in sized if plan.memory and plan.memory.within_budget]
    return [min(within, key=_needed)] if within else []


def _needed(plan: Plan) -> int:
    assert plan.memory
    return plan.memory.process_bytes


def _size_all(config: RunConfig, drafts: list[Plan], estimate: Estimator, clock: Clock | None) -> list[Plan]:
    """The drafts worth sizing, with their memory."""
    sized: list[Plan] = []
    for engine in dict.fromkeys(draft.engine for draft in drafts):
        best = _best_without_memory_limit(config, drafts, sized, clock)
        of_engine = [draft for draft in drafts if draft.engine == engine]
        if best is not None:
            of_engine = [draft for draft in of_engine if _same_split(draft, best)]
        sized += _size_engine(config, of_engine, estimate)
    return sized


def _size_engine(config: RunConfig, drafts: list[Plan], estimate: Estimator) -> list[Plan]:
    """Sizes one engine's drafts up to the first that does not fit, separately for each checkpointing mode."""
    sized: list[Plan] = []
    exhausted: set[bool] = set()
    for draft in drafts:
        needless = any(_recomputes(draft, plan) for plan in _fitting(sized))
        if draft.gradient_checkpointing not in exhausted and not needless:
            memory = estimate(config, draft)
            sized.append(replace(draft, memory=memory))
            if not memory.fits:
                exhausted.add(draft.gradient_checkpointing)
    return sized


def _recomputes(one: Plan, other: Plan) -> bool:
    """Whether they differ only in that `one` recomputes activations."""
    return (
        one.engine == other.engine
        and one.gradient_accumulation_steps == other.gradient_accumulation_steps
        and one.gradient_checkpointing
        and not other.gradient_checkpointing
    )


def _recomputed(
    config: RunConfig, chosen: Plan, drafts: list[Plan], sized: list[Plan], estimate: Estimator
) -> list[Plan]:
    """The chosen plan with activations recomputed, unless any such plan has been sized."""
    if any(plan.gradient_checkpointing for plan in sized):
        return []
    found = [draft for draft in drafts if _recomputes(draft, chosen)]
    return [replace(draft, memory=estimate(config, draft)) for draft in found]


def _same_split(one: Plan, other: Plan) -> bool:
    return (one.gradient_accumulation_steps, one.gradient_checkpointing) == (
        other.gradient_accumulation_steps,
        other.gradient_checkpointing,
    )


def _best_without_memory_limit(
    config: RunConfig, drafts: list[Plan], sized: list[Plan], clock: Clock | None
) -> Plan | None:
    """The fastest plan so far if more memory would not make it faster; None if it might."""
    fitting = _fitting(sized)
    if not fitting or clock is None:
        return None
    best, seconds = _pick_fastest(config, fitting, clock)
    larger_is_slower = any(
        plan.gradient_accumulation_steps < best.gradient_accumulation_steps for plan in fitting
    )
    largest = best.gradient_accumulation_steps == min(draft.gradient_accumulation_steps for draft in drafts)
    could_keep = best.gradient_checkpointing and not all(draft.gradient_checkpointing for draft in drafts)
    return best if seconds and (larger_is_slower or largest) and not could_keep else None


def _without_estimate(drafts: list[Plan]) -> Plan:
    reason = "the smallest micro-batch, since this model's memory cannot be predicted"
    if len({draft.micro_batch_size for draft in drafts}) == 1:
        reason = "micro-batch as set in the config"
    return replace(drafts[0], why=(batch_sentence(drafts[0]), reason, *drafts[0].why))


def _pick_fastest(config: RunConfig, fitting: list[Plan], clock: Clock | None) -> tuple[Plan, float | None]:
    """The fastest plan, and of plans that tie the one with the largest micro-batch.

    Some engines cost speed that a clock does not know of, so they are left out where another one fits with
    the same split. If speed is unknown, the largest micro-batch with the first plan's engine and
    checkpointing.
    """
    fitting = [plan for plan in fitting if not _trades_speed_needlessly(plan, fitting)]
    times = [clock(config, plan) if clock else None for plan in fitting]
    known = [(plan, time) for plan, time in zip(fitting, times, strict=True) if time is not None]
    if len(known) < len(fitting):
        first = (fitting[0].engine, fitting[0].gradient_checkpointing)
        alike = [plan for plan in fitting if (plan.engine, plan.gradient_checkpointing) == first]
        return min(alike, key=lambda plan: plan.gradient_accumulation_steps), None
    best = min(time for _, time in known)
    tied = [(plan, time) for plan, time in known if time <= best * (1 + TIE)]
    return min(tied, key=lambda pair: (pair[0].gradient_accumulation_steps, pair[1]))


def _trades_speed_needlessly(plan: Plan, fitting: list[Plan]) -> bool:
    others = (other for other in fitting if not engine_of(other.engine).trades_speed)
    return engine_of(plan.engine).trades_speed and any(_same_split(plan, other) for other in others)


def _reasons(config: RunConfig, chosen: Plan, sized: list[Plan], seconds: float | None) -> tuple[str, ...]:
    fitting = _fitting(sized)
    return (
        batch_sentence(chosen),
        dealing_sentence(chosen),
        _micro_batch_reason(chosen, sized, seconds),
        _checkpointing_reason(config, chosen, fitting),
        *([engine_sentence(chosen, fitting)] if chosen.world_size > 1 else []),
        *chosen.why,
    )


def _micro_batch_reason(chosen: Plan, sized: list[Plan], seconds: float | None) -> str:
    """Why not a larger micro-batch; of the chosen kind, unless only others have one that fits."""
    name = f"micro-batch {chosen.micro_batch_size:,}"
    larger = [p for p in sized if p.gradient_accumulation_steps < chosen.gradient_accumulation_steps]
    alike = [plan for plan in larger if _kind(plan) == _kind(chosen)]
    verdict = "predicted to be slower" if seconds else "not faster"
    if fitting := _fitting(alike):
        return f"{name}: up to {_most(fitting):,} would fit, which is {verdict}"
    if chosen.gradient_accumulation_steps == 1:
        return f"{name}: all rows of a step at once"
    reason = f"{name}: the largest that the config allows"
    if alike:
        next_larger = min(alike, key=lambda plan: plan.micro_batch_size)
        seen = next_larger.memory and next_larger.memory.ran_out
        shown = ", as an earlier run has shown" if seen else ""
        reason = f"{name}: {next_larger.micro_batch_size:,} would not fit{shown}"
    if fitting := _fitting(larger):
        how = _difference(max(fitting, key=lambda plan: plan.micro_batch_size), chosen)
        reason += f"; {how}, up to {_most(fitting):,} would, which is {verdict}"
    return reason


def _kind(plan: Plan) -> tuple[str, bool]:
    """What plans of different micro-batches may have in common."""
    return plan.engine, plan.gradient_checkpointing


def _most(plans: list[Plan]) -> int:
    return max(plan.micro_batch_size for plan in plans)


def _difference(other: Plan, chosen: Plan) -> str:
    """How the kind of a plan differs from that of the chosen one."""
    engine = f"with {engine_of(other.engine).label}" if other.engine != chosen.engine else ""
    activations = "recomputed" if other.gradient_checkpointing else "kept"
    same = other.gradient_checkpointing == chosen.gradient_checkpointing
    return " and ".join(part for part in (engine, "" if same else f"with activations {activations}") if part)


def _checkpointing_reason(config: RunConfig, chosen: Plan, fitting: list[Plan]) -> str:
    if config.train.gradient_checkpointing != "auto":
        state = "on" if chosen.gradient_checkpointing else "off"
        return f"gradient checkpointing {state}, as set in the config"
    if not chosen.gradient_checkpointing:
        return "gradient checkpointing off: activations fit, and recomputing them costs a third more compute"
    if all(plan.gradient_checkpointing for plan in fitting):
        return "gradient checkpointing on: stored activations would exceed the budget"
    return "gradient checkpointing on: predicted to be faster, since larger micro-batches fit"


def engine_sentence(chosen: Plan, sized: Iterable[Plan]) -> str:
    """What the engine does for the memory of this run, compared with the best other engine that was sized."""
    engine = engine_of(chosen.engine)
    choice = f"{engine.label} over {chosen.world_size} processes"
    others = [plan for plan in sized if plan.engine != chosen.engine and _same_split(plan, chosen)]
    if not others:
        return choice
    other = min(others, key=_needed)
    label, saved = engine_of(other.engine).label, _needed(other) - _needed(chosen)
    if engine.trades_speed:
        return f"{choice}: {engine.principle}, which saves {format_bytes(saved)} over {label}"
    difference = f"save {format_bytes(-saved)}" if saved < 0 else f"need {format_bytes(saved)} more"
    return f"{choice}: {engine.principle}; {label} would {difference}"


def _alternative_rows(
    config: RunConfig, chosen: Plan, sized: list[Plan], clock: Clock | None
) -> tuple[dict[str, Any], ...]:
    """Other plans for the report: all that were sized of the chosen kind, and the best of each other kind.

    A kind is an engine with or without checkpointing.
    """
    base = clock(config, chosen) if clock else None
    kinds: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for plan in sized:
        if _same_split(plan, chosen) and plan.engine == chosen.engine:
            continue
        assert plan.memory
        time = clock(config, plan) if clock else None
        speed = base / time if base and time else None
        if speed and _recomputes(plan, chosen):  # a measured time beside a predicted one may say otherwise
            speed = min(speed, 1.0)
        row = {
            "micro_batch_size": plan.micro_batch_size,
            "gradient_accumulation_steps": plan.gradient_accumulation_steps,
            "gradient_checkpointing": plan.gradient_checkpointing,
            "engine": plan.engine,
            "peak_bytes": plan.memory.peak_bytes,
            "process_bytes": plan.memory.process_bytes,
            "fits": plan.memory.fits,
            "ran_out": plan.memory.ran_out,
            "relative_speed": speed,
        }
        kinds.setdefault(_kind(plan), []).append(row)
    rows: list[dict[str, Any]] = []
    for kind, found in kinds.items():
        own = kind == _kind(chosen)
        rows += sorted(found, key=_preference)[: None if own else 1]
    return tuple(sorted(rows, key=_preference))


def _preference(row: dict[str, Any]) -> tuple[bool, float]:
    """Sorts alternatives: those that fit first, then the fastest."""
    return not row["fits"], -(row["relative_speed"] or 0)


def possible_changes(config: RunConfig, plan: Plan) -> list[tuple[str, RunConfig, Plan]]:
    """Changes that could make a run fit, cheapest first: the setting, the config and plan that it gives."""
    tuning, train = config.tuning, config.train
    found: list[tuple[str, RunConfig, Plan]] = []
    if not plan.gradient_checkpointing:
        checkpointed = replace(plan, gradient_checkpointing=True)
        found.append(("train.gradient_checkpointing=true", config, checkpointed))
    if plan.rows_per_micro_batch > 1:
        one = plan.max_seq_len if plan.packing else 1
        smallest = replace(
            plan,
            micro_batch_size=one,
            micro_batch_tokens=plan.max_seq_len,
            gradient_accumulation_steps=-(-plan.rows_per_step // plan.world_size),
        )
        found.append((f"train.batch_size={one}", config, smallest))
    if train.optimizer == "adamw":
        lighter = config.model_copy(update={"train": train.model_copy(update={"optimizer": "adamw_8bit"})})
        found.append(("train.optimizer=adamw_8bit", lighter, plan))
    for mode in lighter_modes(tuning.mode, tuning.lora.init):
        changed = config.model_copy(update={"tuning": tuning.model_copy(update={"mode": mode})})
        dtype = AUTOCAST.get(plan.mixed_precision, plan.dtype)
        found.append((f"tuning.mode={mode}", changed, replace(plan, dtype=dtype)))
    for length in (plan.max_seq_len * 3 // 4, plan.max_seq_len // 2, plan.max_seq_len // 4):
        shorter = length // 64 * 64
        if shorter:
            unit = shorter if plan.packing else 1
            changed_plan = replace(
                plan,
                max_seq_len=shorter,
                micro_batch_size=plan.rows_per_micro_batch * unit,
                effective_batch_size=plan.rows_per_step * unit,
                micro_batch_tokens=min(plan.micro_batch_tokens, plan.rows_per_micro_batch * shorter),
            )
            found.append((f"model.max_seq_len={shorter}", config, changed_plan))
    for engine in distributed_engines():
        if engine.trades_speed and engine.name != plan.engine and not engine.problem(config):
            for world in sorted({max(2, plan.world_size), 2 * plan.world_size, 4 * plan.world_size}):
                divided = replace(plan, engine=engine.name, world_size=world)
                found.append((f"{world} GPUs with {engine.label}", config, divided))
    return found


def _misfit(smallest: Plan) -> str:
    memory = smallest.memory
    assert memory
    over = memory.process_bytes - memory.budget_bytes
    checkpointing = ", gradient checkpointing" if smallest.gradient_checkpointing else ""
    return (
        f"this run does not fit: the smallest plan (micro-batch {smallest.micro_batch_size}{checkpointing}) "
        f"needs {format_bytes(memory.process_bytes)} in the {memory.peak_phase} phase, "
        f"{format_bytes(over)} more than the budget of {format_bytes(memory.budget_bytes)}"
    )


def explain_misfit(config: RunConfig, smallest: Plan, estimate: Estimator) -> str:
    """By how much the smallest plan exceeds the budget, and the single changes that would make it fit."""
    memory = smallest.memory
    assert memory
    terms = sorted(memory.terms.items(), key=lambda item: -item[1])[:4]
    largest = ", ".join(f"{name} {format_bytes(size)}" for name, size in terms if size)
    lines = [_misfit(smallest), f"largest parts: {largest}"]
    sufficient: list[str] = []
    partial: list[tuple[int, str]] = []
    for what, changed_config, changed_plan in possible_changes(config, smallest):
        try:
            needed = estimate(changed_config, changed_plan)
        except ConfigError:  # this model does not allow it
            continue
        change = format_bytes(needed.process_bytes - memory.process_bytes)
        line = f"  {what}: {change}, then {format_bytes(needed.process_bytes)}"
        if needed.fits:
            sufficient.append(line)
        else:
            partial.append((needed.process_bytes, line))
    if sufficient:
        lines += ["any one of these changes makes it fit:", *sufficient]
    else:
        most = [line for _, line in sorted(partial)[:4]]
        lines += ["no single change is enough; these help most:", *most]
    return "\n".join(lines)
