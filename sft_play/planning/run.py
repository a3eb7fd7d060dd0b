"""Plans a run: gathers what the search needs from data, model and machine."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from sft_play.config.schema import RunConfig
from sft_play.errors import DoesNotFitError, UntraceableModel
from sft_play.machine.gpus import Machine
from sft_play.plan import Device, Plan
from sft_play.planning.devices import memory_device, memory_notes, training_device
from sft_play.planning.drafts import draft_plans
from sft_play.planning.facts import DataFacts, assumptions
from sft_play.planning.methods import method_notes
from sft_play.planning.search import choose_plan
from sft_play.planning.timing import plan_clock, profile_notes
from sft_play.sizing import questions
from sft_play.sizing.architecture import AnyArchitecture, Architecture
from sft_play.sizing.corrections import (
    corrected_clock,
    corrected_estimator,
    correction_sentence,
    ran_out_sentence,
    read_ran_out,
    read_ratios,
    record_path,
)
from sft_play.sizing.estimator import estimator, work_of_plans
from sft_play.sizing.step import StepSpec


def plan_run(
    config: RunConfig,
    model_config: AnyArchitecture,
    facts: DataFacts,
    machine: Machine,
    processes: int,
    *,
    accept: Callable[[Plan], bool] = lambda draft: True,
    budget_bytes: int | None = None,
    explain: bool = True,
) -> Plan:
    """The fastest plan that fits.

    Args:
        config: the run.
        model_config: the architecture.
        facts: of the training rows.
        machine: that it runs on.
        processes: number of processes.
        accept: which of the plans that the config allows are considered.
        budget_bytes: of each process; default: from the machine's free memory.
        explain: as in `choose_plan`.

    Raises:
        ConfigError: settings contradict each other, the model or the machine.
        DoesNotFitError: nothing fits.
    """
    device, architecture = training_device(machine), Architecture.of(model_config)
    drafts, padding = allowed_plans(config, architecture, facts, device, processes)
    drafts = [draft for draft in drafts if accept(draft)]
    if not drafts:
        raise DoesNotFitError("the config allows no other plan")
    notes = [*_trained_besides(config, architecture), *padding, *assumptions(facts)]
    budget = memory_device(config, machine, processes)
    if budget is None:
        plan = choose_plan(config, drafts, None, None)
        return replace(plan, why=(*plan.why, f"free memory of {device.name} is unknown", *notes))
    if budget_bytes is not None:
        budget = replace(budget, budget_bytes=budget_bytes)
    notes += memory_notes(config, machine, processes, budget)
    notes += profile_notes(machine, processes)

    def record(run: RunConfig, plan: Plan) -> Path:
        return record_path(architecture.text, device.name, run, plan)

    try:
        memory_of = corrected_estimator(estimator(architecture, budget, facts.eval_shape), record)
        predicted = plan_clock(architecture, facts, machine, processes)
        time_of = corrected_clock(predicted, record, facts.tokens_per_process)
        plan = choose_plan(config, drafts, memory_of, time_of, explain=explain)
    except UntraceableModel as error:
        plan = choose_plan(config, drafts, None, None)
        return replace(plan, why=(*plan.why, str(error).splitlines()[0], *notes))
    assert plan.memory
    path = record(config, plan)
    correction = correction_sentence(read_ratios(path), plan.memory.peak_phase)
    correction += ran_out_sentence(read_ran_out(path), plan, plan.memory)
    kernel = architecture.ask(questions.attention_kernel, StepSpec.of(config, plan))
    methods = method_notes(config, plan, partial(_trained_elements, config, plan, architecture, facts))
    return replace(plan, why=(*plan.why, *([kernel] if kernel else []), *methods, *correction, *notes))


def _trained_elements(config: RunConfig, plan: Plan, model_config: AnyArchitecture, facts: DataFacts) -> int:
    work = work_of_plans(model_config, facts.eval_shape)
    return work(config, plan, plan.micro_batch_tokens).trained_elements


def _trained_besides(config: RunConfig, architecture: Architecture) -> list[str]:
    tokens = len(config.model.new_tokens)
    modules = config.tuning.lora.modules_to_save if config.tuning.mode != "full" else ()
    return architecture.ask(questions.trained_besides, tokens, modules) if tokens or modules else []


def _attention(config: RunConfig, architecture: Architecture, device: Device) -> str:
    asked, kind, capability = config.model.attention, device.kind, device.compute_capability
    if kind == "cuda" and questions.has_attention_packages():  # depends on more than what it is asked about
        return questions.attention(architecture.config, asked, kind, capability)
    return architecture.ask(questions.attention, asked, kind, capability)


def allowed_plans(
    config: RunConfig, model_config: AnyArchitecture, facts: DataFacts, device: Device, processes: int
) -> tuple[list[Plan], list[str]]:
    """Every plan that the config allows, before memory is estimated, and notes, as on padded rows.

    Raises:
        ConfigError: settings contradict each other, the model or the device.
    """
    architecture, train = Architecture.of(model_config), config.train
    packed = [architecture.ask(questions.packable)] if config.tuning.mode == "qlora" else []
    attention = _attention(config, architecture, device)
    padding_free, reason = architecture.ask(
        questions.joined_rows, train.packing, train.padding_free, attention
    )
    hidden_size = architecture.ask(questions.hidden_size)
    drafts = draft_plans(
        config,
        device=device,
        world_size=processes,
        rows=facts.rows,
        max_seq_len=facts.longest_row,
        attention=attention,
        padding_free=padding_free,
        largest=lambda split, steps: facts.largest_micro_batch(split, steps, hidden_size, padding_free),
    )
    return [replace(draft, sequence_tokens=int(facts.mean_tokens)) for draft in drafts], [*packed, *reason]
