"""What a plan says of itself beside the reasons of the search: precision, kernels, methods, earlier runs."""

from collections.abc import Callable, Iterator

from sft_play.choices.kernels import LAYERS, within
from sft_play.choices.optimizers import DEFAULT, OPTIMIZERS
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.machine.gpus import Machine
from sft_play.machine.links import links_of
from sft_play.model.attention.table import ATTENTIONS, NAME
from sft_play.plan import EARLIER, PROFILED, Estimator, Plan
from sft_play.planning.budget import training_threads
from sft_play.planning.candidates.compiled import compiled_reasons
from sft_play.planning.request import Request
from sft_play.planning.speed.clock import work_of_request
from sft_play.planning.speed.devices import collectives_of, device_name, only_while_busy, profile_of
from sft_play.reasons import choices, evidence, method
from sft_play.sizing.estimate.corrections import Record, reasons_of
from sft_play.sizing.facts import step_facts
from sft_play.sizing.facts.architecture import Architecture
from sft_play.sizing.step import StepSpec

LONG_WAIT = 0.1  # of a step


def step_reasons(request: Request, plan: Plan, record: Record, estimate: Estimator | None) -> list[str]:
    """The kernel of attention, the methods, and what earlier runs have shown, of a plan with its memory.

    `estimate` sizes other kernels; None leaves them out.
    """
    assert plan.memory
    config, architecture = request.config, request.architecture
    kernel = architecture.ask(step_facts.attention_kernel, StepSpec.of(config, plan))
    threads = training_threads(request.machine, request.processes) or 1

    def trained_elements() -> int:
        return work_of_request(request)(config, plan, plan.rows.most_tokens).trained_elements

    return [
        *([kernel] if kernel else []),
        *scratch_reasons(config, plan, threads),
        *attention_reasons(config, plan, architecture),
        *(layer_kernels(config, plan, architecture, estimate) if estimate else []),
        *compiled_reasons(config, plan, architecture, request.facts.pictures),
        *method_reasons(config, plan, trained_elements),
        *reasons_of(record, plan, plan.memory),
    ]


def scratch_reasons(config: RunConfig, plan: Plan, threads: int) -> list[str]:
    """On a CPU, that no rule describes what products take there, if none does."""
    if plan.device != "cpu":
        return []
    spec = StepSpec.of(config, plan).on_this_cpu(threads)
    off = [rule for _, rule in spec.scratch if not rule.holds]
    if not off:
        return []
    bounds, most = [rule.most for rule in off if rule.most is not None], None
    if len(bounds) == len(off):
        most = max(bounds)
    worst = max(rule.worst for rule in off)
    return [evidence.scratch_off_rule(spec.precision.computed_in, worst, most)]


def attention_reasons(config: RunConfig, plan: Plan, architecture: Architecture) -> list[str]:
    """FlashAttention 3, and why it is off, on GPUs that it is made for; PyTorch's own kernel is version 2."""
    name, capability = "flash_attention_3", plan.compute_capability
    row = ATTENTIONS[name]
    ours = (
        config.model.attention == "auto"
        and plan.kernels.attention == NAME
        and not plan.sharing.sequence_parallel
    )
    if not ours or plan.device != "cuda" or not (capability and within(capability, row.preferred)):
        return []
    try:
        architecture.ask(step_facts.attention, name, plan.device, capability, plan.precision.computed_in)
    except ConfigError:  # nobody asked for it
        return []
    return [method.unproven(row.joined.label, f"model.attention={name}")]


def layer_kernels(
    config: RunConfig, plan: Plan, architecture: Architecture, estimate: Estimator
) -> list[str]:
    """Other kernels: what they save, for which a step with ours is traced, or that a run will time them."""
    found = []
    for name, row in LAYERS.items() if plan.device == "cuda" else ():
        used, could = name == plan.kernels.layers, config.train.kernels == "auto" and bool(row.packages)
        if not (used or could) or not row.runs_on(plan.device, plan.compute_capability):
            continue
        if not (modules := architecture.modules.served[name]):  # nobody asked for them
            continue
        kernels = ("own", name) if used else ()
        peaks = [estimate(config, plan.with_layers(each)).peak_bytes for each in kernels]
        found.append(method.layer_kernels(name, modules, peaks[0] - peaks[1] if used else None))
    return found


def also_trained(request: Request) -> list[str]:
    """What is trained beside adapters."""
    tuning, tokens = request.config.tuning, len(request.config.model.new_tokens)
    modules = tuning.lora.modules_to_save if tuning.mode != "full" else ()
    if not tokens and not modules:
        return []
    return [found for found in request.architecture.ask(step_facts.also_trained, tokens, modules) if found]


def method_reasons(config: RunConfig, plan: Plan, trained_elements: Callable[[], int]) -> Iterator[str]:
    """One for each method that is not the default, of a plan with its memory.

    Steps may have to be traced to count the trained elements.
    """
    optimizer, lora = OPTIMIZERS[config.train.optimizer], config.tuning.lora
    if optimizer.name != DEFAULT and plan.memory is not None:
        states, paged = plan.memory.phase_terms["forward"]["optimizer"], None
        if optimizer.unpaged:
            paged = optimizer.moments * optimizer.bits // 8 * trained_elements() - states
        yield method.optimizer_states(optimizer.name, states, paged)
    if config.tuning.mode != "full" and lora.rank_pattern:
        yield method.ranks(lora.r, lora.rank_pattern)
    if config.tuning.mode != "full" and lora.plus_ratio:
        yield method.lora_plus(plan.schedule.learning_rate, lora.plus_ratio)
    if config.tuning.mode != "full" and lora.init != "default":
        yield method.decomposed(lora.init)
    if config.train.neftune_noise_alpha is not None:
        yield method.noise(config.train.neftune_noise_alpha)


def waiting_reasons(request: Request, plan: Plan) -> list[str]:
    """That processes wait for the one with the most tokens, if that takes long."""
    if plan.sharing.data_ranks == 1 or not plan.rows.joined:
        return []
    waited = 1 - 1 / request.facts.busiest_share(plan, request.architecture.facts.hidden_size)
    if waited < LONG_WAIT:
        return []
    return [choices.waiting(waited, may_pack=request.facts.pictures.may_pack(plan.rows.packing))]


def profile_reasons(machine: Machine, processes: int, origin: str = PROFILED, replicas: int = 1) -> list[str]:
    """Where the seconds of a plan come from; `origin` is that of a step: the profile or an earlier run."""
    profile = profile_of(machine, processes)
    busy = only_while_busy(machine, processes)
    found = []
    if busy:
        found.append(evidence.only_while_busy(device_name(machine)))
    if profile is None:
        return found
    source = f"seconds from the profile of {profile.device}, {profile.source}"
    if origin == EARLIER:
        source = evidence.SECONDS_OF_EARLIER_RUN
    found = [source, *found]
    if processes > 1:
        collectives = collectives_of(machine, processes, replicas)
        measured = collectives is not None and collectives.measured
        links = links_of(machine, processes, replicas)
        slowest, faster = tuple(link.slowest for link in links), any(link.either for link in links)
        found.append(
            evidence.communication(
                processes,
                slowest,
                measured=measured,
                measured_later=not machine.what_if,
                may_be_faster=faster,
            )
        )
    return found
