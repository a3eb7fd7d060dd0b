"""The plan of a run: what the data, the model and the machine say, brought together for the search."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sft_play.config.schema import RunConfig
from sft_play.data.packing import pack
from sft_play.data.prepare import PreparedData, prepare
from sft_play.errors import ConfigError, DataError, DoesNotFitError
from sft_play.hardware import Machine, detect
from sft_play.model import choose_attention, load_model_config, load_tokenizer, position_limit
from sft_play.runlog import console
from sft_play.sizing import memory
from sft_play.sizing.batch import learning_rates
from sft_play.sizing.estimator import clock, estimator, exchanged_bytes, known_workload
from sft_play.sizing.planner import Device, Plan, draft_plans
from sft_play.sizing.records import corrected_estimator, correction_sentence, read_overhead, read_ratios, record_path
from sft_play.sizing.search import choose_plan
from sft_play.sizing.throughput import CPU_BANDWIDTH, CPU_FLOPS_PER_CORE, Speed
from sft_play.sizing.trace import UntraceableModel
from sft_play.units import GIB, format_bytes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

UNSEEN_SEQ_LEN = 2048  # a plan without data is made for rows of this length, unless model.max_seq_len says another
UNSEEN_ROWS = 10_000
SCALES = (1, 2, 4, 8)


@dataclass(frozen=True)
class DataFacts:
    """What a plan needs to know of the training rows."""

    rows: int  # packed sequences when train.packing
    longest_row: int  # tokens that a row of the collator may have; packed, what a sequence is filled up to
    mean_tokens: float
    supervised_share: float  # of a micro-batch's tokens, at most
    longest_eval_row: int | None = None
    seen: bool = True

    @classmethod
    def of(cls, data: PreparedData, config: RunConfig) -> "DataFacts":
        """Measured on the tokenised rows."""
        lengths = np.asarray(data.train["length"])
        supervised = np.array([sum(label != -100 for label in labels) for labels in data.train["labels"]])
        packing, longest = config.train.packing, int(lengths.max())
        return cls(
            rows=len(pack(lengths.tolist(), data.max_seq_len)) if packing else len(lengths),
            longest_row=data.max_seq_len if packing else longest,
            mean_tokens=float(lengths.mean()),
            supervised_share=float((supervised / lengths).max() if packing else supervised.max() / longest),
            longest_eval_row=max(data.val["length"]) if data.val is not None else None,
        )

    @classmethod
    def unseen(cls, config: RunConfig, model_config: "PretrainedConfig") -> "DataFacts":
        """Assumed where there is no data yet: full rows, every token supervised."""
        asked = config.model.max_seq_len
        length = min(UNSEEN_SEQ_LEN, position_limit(model_config) or UNSEEN_SEQ_LEN) if asked == "auto" else asked
        return cls(UNSEEN_ROWS, length, length, 1.0, seen=False)


def data_facts(config: RunConfig, model_config: "PretrainedConfig", *, progress: bool) -> DataFacts:
    """From the tokenised rows; assumed where there is no data or no tokenizer yet, since a plan needs config.json alone."""
    try:
        tokenizer = load_tokenizer(config.model)
        return DataFacts.of(prepare(config, tokenizer, model_limit=position_limit(model_config), progress=progress), config)
    except (ConfigError, DataError) as error:
        console().print(f"  [yellow]planned without data:[/] {str(error).splitlines()[0]}")
        return DataFacts.unseen(config, model_config)


def training_device(machine: Machine) -> Device:
    """What the planner needs to know of the devices; the least able one decides."""
    if not machine.gpus:
        return Device(kind="cpu", name="the CPU", bf16=True, free_bytes=machine.ram_free_bytes)
    free = [gpu.free_bytes for gpu in machine.gpus if gpu.free_bytes is not None]
    return Device(
        kind="cuda",
        name=machine.gpus[0].name,
        bf16=all(bool(gpu.bf16) for gpu in machine.gpus),
        free_bytes=min(free) if free else None,
    )


def smallest_total(machine: Machine) -> int | None:
    """Bytes of the smallest GPU, or of the RAM; None if that is not known."""
    totals = [gpu.total_bytes for gpu in machine.gpus] or [machine.host.ram_total_bytes]
    known = [total for total in totals if total is not None]
    return min(known) if known else None


def device_speed(machine: Machine, processes: int) -> Speed:
    """Data-sheet speed of the slowest GPU, or an assumption for a share of the CPU."""
    if not machine.gpus:
        share = (machine.host.cpu_cores or 1) / processes
        return Speed(flops=CPU_FLOPS_PER_CORE * share, bandwidth=CPU_BANDWIDTH / processes)
    flops = [gpu.tflops for gpu in machine.gpus]
    bandwidths = [gpu.bandwidth_gb_s for gpu in machine.gpus]
    links = [gpu.link_gb_s for gpu in machine.gpus]
    if None in flops or None in bandwidths:
        return Speed(flops=None, bandwidth=None)
    return Speed(
        flops=1e12 * min(f for f in flops if f),
        bandwidth=1e9 * min(b for b in bandwidths if b),
        link_bandwidth=None if None in links else 1e9 * min(link for link in links if link),
    )


def memory_of_a_process(config: RunConfig, machine: Machine, processes: int) -> int | None:
    """What a process may take: what is free, at most parallel.memory_gib; None if that is not known.

    Raises:
        ConfigError: parallel.memory_gib is more than there is.
    """
    device, asked = training_device(machine), config.parallel.memory_gib
    free, total = device.free_bytes, smallest_total(machine)
    if device.kind == "cpu":  # processes share the RAM
        free, total = (None if size is None else size // processes for size in (free, total))
    if asked == "auto":
        return free
    if total is not None and asked * GIB > total:
        has = f"{device.name} has" if device.kind == "cuda" else f"the RAM has for each of {processes} process(es)"
        raise ConfigError(
            f"parallel.memory_gib={asked:g}: {has} {format_bytes(total)}, of which {format_bytes(free or 0)} are free; "
            f"allowed: up to {math.floor(100 * total / GIB) / 100:g}, or auto, which takes what is free"
        )
    return int(asked * GIB) if free is None else min(free, int(asked * GIB))


def memory_device(config: RunConfig, machine: Machine, processes: int) -> memory.DeviceBudget | None:
    """The budget of each process; None if the free memory is not known."""
    usable = memory_of_a_process(config, machine, processes)
    if usable is None:
        return None
    if not machine.gpus:
        return memory.device_budget("cpu", usable)
    capability = machine.gpus[0].compute_capability
    overhead = read_overhead(training_device(machine).name, processes)
    return memory.device_budget(
        "cuda",
        usable,
        world_size=processes,
        compute_capability=capability,
        context_bytes=overhead,
        communicator_bytes=None if overhead is None else 0,  # it was measured with the context
    )


def memory_notes(config: RunConfig, machine: Machine, processes: int, budget: memory.DeviceBudget) -> list[str]:
    """Where the budget comes from, in sentences."""
    notes, asked = [], config.parallel.memory_gib
    if asked != "auto":
        usable = memory_of_a_process(config, machine, processes) or 0
        less = f", but only {format_bytes(usable)} are free" if usable < int(asked * GIB) else ""
        notes.append(f"each process may take {asked:g} GiB (parallel.memory_gib){less}")
    notes.append(f"guard {format_bytes(budget.guard.bytes)}: {budget.guard.why}")
    if budget.assumed:
        notes.append(f"assumed, not measured: {' and '.join(budget.assumed)} of each process")
    return notes


def plan_run(
    config: RunConfig,
    model_config: "PretrainedConfig",
    facts: DataFacts,
    machine: Machine,
    processes: int,
    *,
    accept: Callable[[Plan], bool] = lambda draft: True,
    budget_bytes: int | None = None,
) -> Plan:
    """The fastest plan that fits.

    Args:
        config: the run.
        model_config: the architecture.
        facts: of the training rows.
        machine: what it runs on.
        processes: how many.
        accept: which of the plans that the config allows are looked at.
        budget_bytes: of each process; default from the machine's free memory.

    Raises:
        ConfigError: what is asked for contradicts itself or the machine.
        DoesNotFitError: nothing fits.
    """
    device = training_device(machine)
    allowed = draft_plans(
        config,
        device=device,
        world_size=processes,
        rows=facts.rows,
        max_seq_len=facts.longest_row,
        attention=choose_attention(config.model.attention, model_config, device.kind),
    )
    drafts = [draft for draft in allowed if accept(draft)]
    if not drafts:
        raise DoesNotFitError("the config allows no other plan")
    budget = memory_device(config, machine, processes)
    if budget is None:
        plan = choose_plan(config, drafts, None, None)
        return replace(plan, why=(*plan.why, f"free memory of {device.name} is not known", *_assumptions(facts)))
    if budget_bytes is not None:
        budget = replace(budget, budget_bytes=budget_bytes)
    notes = [*_assumptions(facts), *memory_notes(config, machine, processes, budget)]
    time = clock(model_config, device_speed(machine, processes), facts.mean_tokens)

    def record(run: RunConfig, plan: Plan) -> Path:
        return record_path(model_config.to_json_string(use_diff=False), device.name, run, plan)

    estimate = estimator(model_config, budget, facts.supervised_share, facts.longest_eval_row)
    try:
        plan = choose_plan(config, drafts, corrected_estimator(estimate, record), time)
    except UntraceableModel as error:
        plan = choose_plan(config, drafts, None, None)
        return replace(plan, why=(*plan.why, str(error).splitlines()[0], *notes))
    assert plan.memory
    correction = correction_sentence(read_ratios(record(config, plan)), plan.memory.peak_phase)
    return replace(plan, why=(*plan.why, *correction, *notes))


def _assumptions(facts: DataFacts) -> list[str]:
    """What a plan takes for granted of the data."""
    if facts.seen:
        return []
    return [f"no training rows at hand: planned for rows of {facts.longest_row} tokens, all of them supervised"]


def plan_again(config: RunConfig, data: PreparedData, earlier: Plan, accept: Callable[[Plan], bool]) -> Plan:
    """The fastest plan that `accept` takes, with the engine, the processes and the budget of an earlier one.

    Raises:
        DoesNotFitError: there is none.
    """
    return plan_run(
        config,
        load_model_config(config.model),
        DataFacts.of(data, config),
        detect(),
        earlier.world_size,
        accept=lambda draft: draft.engine == earlier.engine and accept(draft),
        budget_bytes=earlier.memory.budget_bytes if earlier.memory else None,
    )


def record_of(config: RunConfig, plan: Plan) -> tuple[Path, str]:
    """Where a probe of this plan is kept, and the name of this machine's device."""
    device = training_device(detect()).name
    architecture = load_model_config(config.model).to_json_string(use_diff=False)
    return record_path(architecture, device, config, plan), device


def _plan_at_scale(config: RunConfig, model_config: "PretrainedConfig", facts: DataFacts, machine: Machine, world: int) -> Plan:
    """The plan on that many processes; for adapters ZeRO-2, which has little to share then, only where DDP does not fit."""
    if config.parallel.engine == "auto" and config.tuning.mode != "full":
        ddp = config.model_copy(update={"parallel": config.parallel.model_copy(update={"engine": "ddp"})})
        try:
            return plan_run(ddp, model_config, facts, machine, world)
        except DoesNotFitError:
            pass
    return plan_run(config, model_config, facts, machine, world)


def scaling(config: RunConfig, model_config: "PretrainedConfig", facts: DataFacts, machine: Machine) -> list[dict[str, Any]]:
    """The plan on 1, 2, 4 and 8 processes of this machine's kind; `problem` where there is none.

    `speed_up` is None where the link between devices is not known: then `speed_up_at_most` leaves the exchange out.
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
        speed = device_speed(machine, world if not machine.gpus else 1)
        link_known = world == 1 or speed.link_bandwidth is not None
        alone = _seconds_per_sequence(config, model_config, facts, replace(speed, link_bandwidth=None), plan)
        whole = _seconds_per_sequence(config, model_config, facts, speed, plan) if link_known else None
        base = base or whole or alone
        work = known_workload(model_config, config, plan)
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
                "exchanged_bytes": exchanged_bytes(work, config, plan) if work else None,
                "link_bytes_per_second": speed.link_bandwidth,
                "speed_up": base / whole if base and whole else None,
                "speed_up_at_most": base / alone if base and alone else None,
            }
        )
    return rows


def _seconds_per_sequence(
    config: RunConfig, model_config: "PretrainedConfig", facts: DataFacts, speed: Speed, plan: Plan
) -> float | None:
    seconds = clock(model_config, speed, facts.mean_tokens)(config, plan)
    return seconds / plan.effective_batch_size if seconds else None
