"""Plans a run: gathers what the search needs from data, model and machine."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from sft_play.choices.optimizers import DEFAULT, OPTIMIZERS
from sft_play.config.methods import METHODS
from sft_play.config.schema import RunConfig
from sft_play.engines.registry import label_of
from sft_play.errors import ConfigError, DoesNotFitError, UntraceableModel
from sft_play.machine.gpus import Machine
from sft_play.model import float8, liger
from sft_play.model.attention_table import ATTENTIONS, NAME, within
from sft_play.plan import EARLIER, PROFILED, Device, Estimator, Memory, Plan
from sft_play.planning.clock import batches_of, plan_clock
from sft_play.planning.compiled import compiled_reasons, require_compilable, require_compiler
from sft_play.planning.devices import machines_of, memory_device, memory_reasons, training_device
from sft_play.planning.drafts import choose_precision, draft_plans, draft_reasons
from sft_play.planning.facts import DataFacts
from sft_play.planning.measured_speed import SpeedOf, corrected_clock, speeds_of
from sft_play.planning.profile import DeviceProfile
from sft_play.planning.reach import within_reach
from sft_play.planning.search import choose_plan
from sft_play.planning.sequence import require_divisible
from sft_play.planning.speed import (
    collectives_of,
    device_name,
    host_link,
    links_of,
    only_while_busy,
    profile_of,
)
from sft_play.planning.tiles import may_tile, with_tiles
from sft_play.reasons.evidence import (
    AssumedRows,
    Communication,
    OnlyWhileBusy,
    ProfileSource,
    ScratchOffRule,
    SecondsOfEarlierRun,
    UnknownFreeMemory,
    Untraceable,
)
from sft_play.reasons.method import (
    Decomposed,
    LayerKernels,
    LoraPlus,
    Noise,
    OptimizerStates,
    Ranks,
    Unproven,
)
from sft_play.reasons.reason import Reason
from sft_play.sizing import questions
from sft_play.sizing.architecture import AnyArchitecture, Architecture
from sft_play.sizing.corrections import (
    Record,
    RecordOf,
    corrected_estimator,
    reasons_of,
    records_of,
)
from sft_play.sizing.estimator import estimator, work_of_plans
from sft_play.sizing.step import StepSpec
from sft_play.ui.progress import describe
from sft_play.units import AUTOCAST


def plan_run(
    config: RunConfig,
    model_config: AnyArchitecture,
    facts: DataFacts,
    machine: Machine,
    processes: int,
    *,
    machines: int | None = None,
    accept: Callable[[Plan], bool] = lambda draft: True,
    budget_bytes: int | None = None,
    explain: bool = True,
    mix: bool = True,
) -> Plan:
    """The fastest plan that fits, for so many processes on a machine.

    Args:
        config: the run.
        model_config: the architecture.
        facts: of the training rows.
        machine: that it runs on.
        processes: number of them.
        machines: like this one, that they are on; default: this one; of GPUs elsewhere, one for each eight.
        accept: which of the plans that the config allows are considered.
        budget_bytes: of each process; default: from the machine's free memory.
        explain: as in `choose_plan`.
        mix: whether some layers may be recomputed and others not.

    Raises:
        ConfigError: settings contradict each other, the model or the machine.
        DoesNotFitError: nothing fits.
    """
    device, architecture = training_device(machine), Architecture.of(model_config)
    _require_kernels(config, architecture, device, here=not machine.what_if)
    machines = machines or machines_of(machine, processes)
    layers = len(architecture.ask(questions.layer_kinds)) if mix else 0
    allowed, about_rows = allowed_plans(config, architecture, facts, device, processes, machines)
    if not (drafts := [draft for draft in allowed if accept(draft)]):
        raise DoesNotFitError("the config allows no other plan")
    besides = [*_trained_besides(config, architecture), *about_rows, *_assumed(facts)]
    record_of, speed_of = _earlier_runs(architecture, device, profile_of(machine, processes))
    if (budget := memory_device(config, machine, processes, budget_bytes)) is None:
        plan, why = choose_plan(config, drafts, None, None)
        found: list[Reason] = [UnknownFreeMemory(device.name)]
    else:
        drafts, beyond = within_reach(config, architecture, drafts, budget.budget_bytes)
        besides += [*beyond, *memory_reasons(config, machine, processes, budget)]
        seconds = plan_clock(architecture, facts, machine, processes)
        predict = _described(estimator(architecture, budget, batches_of(architecture, facts)), device)
        memory_of = corrected_estimator(predict, record_of)
        time_of = corrected_clock(seconds, speed_of, facts.tokens_per_process)
        try:
            plan, why = choose_plan(config, drafts, memory_of, time_of, explain=explain, layers=layers)
            record, sized = record_of(config, plan), predict if explain else None
            plan = speed_of(config, plan).labelled(plan, seconds(config, plan))
            besides += profile_reasons(machine, processes, plan.step_seconds_origin, plan.sharing.replicas)
            found = _about_the_step(config, plan, architecture, facts, record, budget.threads, sized)
        except UntraceableModel as error:
            plan, why = choose_plan(config, drafts, None, None)
            found = [Untraceable(str(error).splitlines()[0])]
    return replace(plan, why=tuple(map(str, [*why, *draft_reasons(config, device, plan), *found, *besides])))


def _earlier_runs(
    architecture: Architecture, device: Device, profile: DeviceProfile | None
) -> tuple[RecordOf, SpeedOf]:
    """What they have shown of the memory and of the seconds of steps."""
    about = architecture.text, device.name
    return records_of(*about), speeds_of(*about, profile)


def estimator_of_run(
    config: RunConfig, architecture: Architecture, facts: DataFacts, machine: Machine, processes: int
) -> Estimator:
    """Predicts the memory of a run's plans as `plan_run` does.

    Raises:
        ConfigError: it is unknown how much memory is free.
    """
    budget = memory_device(config, machine, processes)
    if budget is None:
        raise ConfigError(f"nothing tells how much memory is free on {training_device(machine).name}")
    device = training_device(machine)
    estimate = _described(estimator(architecture, budget, batches_of(architecture, facts)), device)
    return corrected_estimator(estimate, records_of(architecture.text, device.name))


def _described(estimate: Estimator, device: Device) -> Estimator:
    """The estimator, which says on the live line what it sizes: it may have to trace steps."""

    def sized(run: RunConfig, plan: Plan, *, complete: bool = False) -> Memory:
        shared = plan.sharing
        how = f"{METHODS[run.tuning.mode]}, {label_of(shared.engine, shared.replicas, shared.offload)}"
        size = f"micro-batch {plan.batch.micro:,}"
        describe(f"planning: {how}, {size} on {shared.world_size} x {device.name}")
        return estimate(run, plan, complete=complete)

    return sized


def _about_the_step(
    config: RunConfig,
    plan: Plan,
    architecture: Architecture,
    facts: DataFacts,
    record: Record,
    threads: int,
    estimate: Estimator | None,
) -> list[Reason]:
    """The kernel of attention, the methods, and what earlier runs have shown."""
    assert plan.memory
    kernel = architecture.ask(questions.attention_kernel, StepSpec.of(config, plan))

    def trained_elements() -> int:
        work = work_of_plans(architecture, batches_of(architecture, facts), threads)
        return work(config, plan, plan.rows.most_tokens).trained_elements

    return [
        *([kernel] if kernel else []),
        *scratch_reasons(config, plan, threads),
        *attention_reasons(config, plan, architecture),
        *(layer_kernels(config, plan, architecture, estimate) if estimate else []),
        *compiled_reasons(config, plan, architecture),
        *method_reasons(config, plan, trained_elements),
        *reasons_of(record, plan, plan.memory),
    ]


def scratch_reasons(config: RunConfig, plan: Plan, threads: int) -> list[Reason]:
    """On a CPU, that no rule describes what products take there, if none does."""
    if plan.device != "cpu":
        return []
    spec = StepSpec.of(config, plan).on_this_cpu(threads)
    worst = max((rule.worst for _, rule in spec.scratch if not rule.holds), default=None)
    return [] if worst is None else [ScratchOffRule(spec.computed_in, worst)]


def _require_kernels(config: RunConfig, architecture: Architecture, device: Device, *, here: bool) -> None:
    """Refuses kernels and compiled layers that device or model cannot run, or that are missing `here`."""
    require_compiler(config, device, here=here)
    if config.train.float8:
        float8.require_runnable(device.kind, device.name, device.compute_capability, here=here)
    if config.train.kernels == "liger":
        liger.require_runnable(device.kind, device.compute_capability, here=here)
        architecture.ask(questions.require_liger_modules)


def attention_reasons(config: RunConfig, plan: Plan, architecture: Architecture) -> list[Reason]:
    """FlashAttention 3, and why it is off, on GPUs that it is made for; PyTorch's own kernel is version 2."""
    name, capability = "flash_attention_3", plan.compute_capability
    row = ATTENTIONS[name]
    ours = config.model.attention == "auto" and plan.attention == NAME and not plan.sharing.divides_tokens
    if not ours or plan.device != "cuda" or not (capability and within(capability, row.preferred)):
        return []
    dtype = AUTOCAST.get(plan.precision.autocast, plan.precision.dtype)
    try:
        architecture.ask(questions.attention, name, plan.device, capability, dtype)
    except ConfigError:  # nobody asked for it
        return []
    return [Unproven(row.joined.label, f"model.attention={name}")]


def layer_kernels(
    config: RunConfig, plan: Plan, architecture: Architecture, estimate: Estimator
) -> list[Reason]:
    """Liger's kernels, and why they are off, where a GPU could run them; another step is traced for it."""
    asked = config.train.kernels
    if plan.device != "cuda" or asked == "own":
        return []
    try:
        liger.require_runnable(plan.device, plan.compute_capability, here=False)
        modules = architecture.ask(questions.require_liger_modules)
    except ConfigError:  # nobody asked for them
        return []
    peaks = {}
    for kernels in ("own", "liger"):
        other = config.model_copy(update={"train": config.train.model_copy(update={"kernels": kernels})})
        peaks[kernels] = estimate(other, plan).peak_bytes
    saved = peaks["own"] - peaks["liger"]
    if asked == "auto" and saved <= 0:
        return []
    return [LayerKernels("off" if asked == "auto" else "liger", modules, saved)]


def _trained_besides(config: RunConfig, architecture: Architecture) -> list[Reason]:
    tokens = len(config.model.new_tokens)
    modules = config.tuning.lora.modules_to_save if config.tuning.mode != "full" else ()
    if not tokens and not modules:
        return []
    return [found for found in architecture.ask(questions.trained_besides, tokens, modules) if found]


def _assumed(facts: DataFacts) -> list[Reason]:
    return [] if facts.seen else [AssumedRows(len(facts.lengths), facts.longest_row)]


def _attention(config: RunConfig, architecture: Architecture, device: Device) -> str:
    asked, kind, capability = config.model.attention, device.kind, device.compute_capability
    dtype, autocast = choose_precision(config, device)
    about = (asked, kind, capability, AUTOCAST.get(autocast.precision, dtype))
    if config.parallel.sequence_ranks > 1 and asked == "auto":  # no package exchanges heads
        about = (asked, "cpu", None, dtype)
    if kind == "cuda" and questions.has_attention_packages():  # depends on more than what it is asked about
        return questions.attention(architecture.config, *about)
    return architecture.ask(questions.attention, *about)


def allowed_plans(
    config: RunConfig,
    model_config: AnyArchitecture,
    facts: DataFacts,
    device: Device,
    processes: int,
    machines: int = 1,
) -> tuple[list[Plan], list[Reason]]:
    """Every plan that the config allows, before memory is estimated, and what is known of rows and weights.

    Raises:
        ConfigError: settings contradict each other, the model or the device.
    """
    architecture, train = Architecture.of(model_config), config.train
    if train.router_aux_loss_coef and not architecture.ask(questions.balances_experts):
        raise ConfigError(
            f"train.router_aux_loss_coef={train.router_aux_loss_coef:g} balances the experts of a mixture; "
            f"{architecture.config.model_type} is not one whose routers can be asked; leave it at 0"
        )
    quantized = config.tuning.mode == "qlora"
    packed = [questions.require_packable(architecture.ask(questions.four_bit))] if quantized else []
    attention = _attention(config, architecture, device)
    require_compilable(config, architecture, attention, device)
    padded = architecture.ask(questions.why_padded, train.packing, train.padding_free, attention)
    require_divisible(config, architecture, attention, padded, processes, machines)
    hidden_size = architecture.ask(questions.hidden_size)
    tiles = may_tile(config, facts.longest_row) and architecture.ask(questions.tiled_mlps) > 0
    if train.mlp_tiles not in ("auto", 1) and not tiles:
        raise ConfigError(
            f"train.mlp_tiles={train.mlp_tiles}: the layers of {architecture.config.model_type} have no MLP "
            "that can compute in tiles (mixtures of experts have none); set train.mlp_tiles=auto"
        )
    drafts = draft_plans(
        config,
        device=device,
        world_size=processes,
        machines=machines,
        rows=facts.rows,
        max_seq_len=facts.longest_row,
        attention=attention,
        padding_free=not padded,
        largest=lambda split, steps: facts.largest_micro_batch(split, steps, hidden_size, not padded),
    )
    drafts = with_tiles(train, drafts) if tiles else drafts
    average = int(facts.mean_tokens)
    drafts = [replace(draft, rows=replace(draft.rows, sequence_tokens=average)) for draft in drafts]
    return drafts, [*packed, *([padded] if padded else [])]


def drafts_of(
    config: RunConfig,
    architecture: Architecture,
    facts: DataFacts,
    machine: Machine,
    processes: int,
    machines: int | None = None,
) -> list[Plan]:
    """Every plan that may be chosen on so many processes, before memory is estimated."""
    machines = machines or machines_of(machine, processes)
    drafts = allowed_plans(config, architecture, facts, training_device(machine), processes, machines)[0]
    if config.train.asked_activations != "auto" or host_link(machine) is not None:
        return drafts
    return [draft for draft in drafts if not draft.offloads_activations]  # as `by_offload` has it


def method_reasons(config: RunConfig, plan: Plan, trained_elements: Callable[[], int]) -> Iterator[Reason]:
    """One for each method that is not the default, of a plan with its memory.

    Steps may have to be traced to count the trained elements.
    """
    optimizer, lora = OPTIMIZERS[config.train.optimizer], config.tuning.lora
    if optimizer.name != DEFAULT and plan.memory is not None:
        states, paged = plan.memory.phase_terms["forward"]["optimizer"], None
        if optimizer.unpaged:
            paged = optimizer.moments * optimizer.bits // 8 * trained_elements() - states
        yield OptimizerStates(optimizer.name, states, paged)
    if config.tuning.mode != "full" and lora.rank_pattern:
        yield Ranks(lora.r, tuple(lora.rank_pattern.items()))
    if config.tuning.mode != "full" and lora.plus_ratio:
        yield LoraPlus(plan.schedule.learning_rate, lora.plus_ratio)
    if config.tuning.mode != "full" and lora.init != "default":
        yield Decomposed(lora.init)
    if config.train.neftune_noise_alpha is not None:
        yield Noise(config.train.neftune_noise_alpha)


def profile_reasons(
    machine: Machine, processes: int, origin: str = PROFILED, replicas: int = 1
) -> list[Reason]:
    """Where the seconds of a plan come from; `origin` is that of a step: the profile or an earlier run."""
    profile = profile_of(machine, processes)
    found: list[Reason] = [OnlyWhileBusy(device_name(machine))] if only_while_busy(machine, processes) else []
    if profile is None:
        return found
    source = ProfileSource(profile.device, profile.source)
    found = [SecondsOfEarlierRun() if origin == EARLIER else source, *found]
    if processes > 1:
        collectives = collectives_of(machine, processes, replicas)
        measured = collectives is not None and collectives.measured
        links = links_of(machine, processes, replicas)
        found.append(Communication(processes, measured, links, not machine.what_if))
    return found
