"""The plans that a request allows, before they are sized, and who predicts their memory."""

from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter

from sft_play.choices.kernels import COMPILED, FLOAT8, LAYERS
from sft_play.config.methods import METHODS
from sft_play.config.schema import RunConfig
from sft_play.engines.registry import label_of
from sft_play.errors import ConfigError
from sft_play.machine.compiler import missing_for_compiler
from sft_play.plan import PROBED, Device, Estimator, Memory, Plan
from sft_play.planning.candidates.compiled import (
    may_compile,
    require_compilable,
    require_compiler,
)
from sft_play.planning.candidates.drafts import choose_precision, draft_plans, leanest
from sft_play.planning.candidates.sequence import require_divisible, why_padded
from sft_play.planning.candidates.tiles import may_tile, untiled, with_tiles, worth_sizing
from sft_play.planning.candidates.weights_alone import held_bytes
from sft_play.planning.request import Request
from sft_play.planning.speed.clock import batches_of
from sft_play.planning.speed.devices import profile_of
from sft_play.planning.speed.timed_kernels import Verdict, kernels_path, read_verdicts, winners_of
from sft_play.reasons.evidence import unknown_free_memory
from sft_play.reasons.method import Padded
from sft_play.sizing.estimate.budget import DeviceBudget
from sft_play.sizing.estimate.corrections import corrected_estimator, records_of
from sft_play.sizing.estimate.estimator import estimator
from sft_play.sizing.facts import step_facts
from sft_play.sizing.facts.model_facts import require_packable
from sft_play.ui.progress import describe
from sft_play.units import AUTOCAST
from sft_play.vision.support import require_supported


def allowed_plans(request: Request) -> tuple[list[Plan], list[str]]:
    """Every plan that the config allows, before memory is estimated, and what is known of rows and weights.

    Raises:
        ConfigError: settings contradict each other, the model or the device.
    """
    config, architecture, facts = request.config, request.architecture, request.facts
    device, train = request.device, config.train
    _require_kernels(request)
    if facts.seen:  # what rows have that are assumed is not known
        require_supported(config, architecture.facts.model_type, seen=facts.pictures.exist)
    if train.router_aux_loss_coef and not architecture.facts.balances_experts:
        raise ConfigError(
            f"train.router_aux_loss_coef={train.router_aux_loss_coef:g} balances the experts of a mixture; "
            f"{architecture.facts.model_type} does not report what its routers choose; leave it at 0"
        )
    quantized = config.tuning.mode == "qlora"
    packed = [require_packable(architecture.facts, architecture.modules)] if quantized else []
    attention = _attention(request)
    require_compilable(config, architecture, attention, device)
    padded = (
        Padded("noise")
        if train.neftune_noise_alpha
        else why_padded(train.packing, train.padding_free, architecture.facts.rows_mix, attention)
    )
    require_divisible(config, architecture, attention, padded, request.processes, request.on_machines)
    hidden_size = architecture.facts.hidden_size
    tiles = may_tile(config, facts.longest_row) and architecture.modules.tiled_mlps > 0
    if train.asks_tiles and not tiles:
        raise untiled(train, architecture.facts.model_type)
    drafts = draft_plans(
        config,
        device=device,
        world_size=request.processes,
        machines=request.on_machines,
        rows=facts.rows,
        max_seq_len=facts.longest_row,
        attention=attention,
        padding_free=not padded,
        largest=lambda split, steps: facts.largest_micro_batch(split, steps, hidden_size, not padded),
    )
    drafts = with_tiles(train, drafts) if tiles else drafts
    average = int(facts.mean_tokens)
    drafts = [replace(draft, rows=replace(draft.rows, sequence_tokens=average)) for draft in drafts]
    return _with_timed_kernels(request, drafts), [*packed, *([str(padded)] if padded else [])]


def _with_timed_kernels(request: Request, drafts: list[Plan]) -> list[Plan]:
    """The drafts with the kernels that won when they were timed for such a run, if none are asked for."""
    if request.machine.what_if:
        return drafts
    path = kernels_path(request.architecture.text, request.device.name, request.config, drafts[0])
    verdicts = read_verdicts(path)
    return [_as_timed(request, draft, verdicts) for draft in drafts] if verdicts else drafts


def _as_timed(request: Request, draft: Plan, verdicts: dict[str, Verdict]) -> Plan:
    """A draft with what was fastest of what it can have and the config leaves open."""
    config, device, compiled = request.config, request.device, verdicts.get(COMPILED.name)
    rows = [LAYERS[name] for name in winners_of(verdicts) if name in LAYERS]
    may_change = config.train.kernels == "auto" and not draft.kernels.compiled
    on_this = device.kind, device.compute_capability
    here = (row for row in rows if may_change and row.runs_on(*on_this) and row.is_installed())
    best = next(here, None)
    share = verdicts[best.name].share if best else 1.0
    pays = compiled is not None and compiled.pays(draft.schedule.total_steps, share)
    may = may_compile(config, draft, request.architecture, request.facts.pictures)
    if pays and may and not missing_for_compiler(device.kind):
        return replace(draft.with_compiled(True), kernels_origin=PROBED)
    return replace(draft.with_layers(best.name), kernels_origin=PROBED) if best else draft


def _require_kernels(request: Request) -> None:
    """Refuses kernels and compiled layers that device or model cannot run, or that are missing here."""
    train, device, here = request.config.train, request.device, not request.machine.what_if
    require_compiler(request.config, device, here=here)
    if train.float8:
        FLOAT8.require_runnable(device.kind, device.compute_capability, name=device.name, here=here)
    if row := LAYERS.get(train.kernels):
        row.require_runnable(device.kind, device.compute_capability, name=device.name, here=here)
        architecture = request.architecture
        row.require_modules(architecture.facts.model_type, architecture.modules.served[row.name])


def _attention(request: Request) -> str:
    config, architecture, device = request.config, request.architecture, request.device
    asked, kind, capability = config.model.attention, device.kind, device.compute_capability
    dtype, autocast = choose_precision(config, device)
    about = (asked, kind, capability, AUTOCAST.get(autocast, dtype))
    if config.parallel.sequence_parallel and asked == "auto":  # no package exchanges heads
        about = (asked, "cpu", None, dtype)
    if kind == "cuda" and step_facts.has_attention_packages():  # depends on more than what it is asked about
        return step_facts.attention(architecture.config, *about)
    return architecture.ask(step_facts.attention, *about)


def candidates(request: Request) -> list[Plan]:
    """Every plan that may be chosen, before memory is estimated; errors as of `allowed_plans`."""
    drafts, _ = allowed_plans(request)
    if request.config.train.asked_activations != "auto" or profile_of(request.machine, request.processes):
        return drafts
    return [draft for draft in drafts if not draft.offloads_activations]  # as `by_offload` has it


def leanest_memories(request: Request) -> Iterator[Memory]:
    """The memory of the plans that take least, one by one, since each may take a trace.

    Those are left out that would not fit whatever their tokens took.

    Raises:
        ConfigError: as of `allowed_plans`, or it is unknown how much memory is free.
    """
    estimate, sized = estimator_of(request), list[Plan]()
    # replicas, each of which fewer processes divide, and what is copied to RAM last
    lean = sorted(leanest_that_may_fit(request), key=attrgetter("offloads_activations", "sharing.replicas"))
    for draft in lean:
        if worth_sizing([draft], sized):
            memory = estimate(request.config, draft)
            sized.append(replace(draft, memory=memory))
            yield memory


def leanest_that_may_fit(request: Request) -> list[Plan]:
    """Those of them whose weights and states alone are not too large; errors as of `leanest_memories`."""
    config, budget = request.config, request.budget
    drafts = leanest(candidates(request))
    if budget is None:
        return drafts
    return [
        draft
        for draft in drafts
        if draft.sharing.offloads
        or held_bytes(config, request.architecture, draft) <= budget.budget_bytes - budget.context_bytes
    ]


def estimator_of(request: Request) -> Estimator:
    """Predicts the memory of its plans, corrected by what earlier runs have shown.

    Raises:
        ConfigError: it is unknown how much memory is free.
    """
    if (budget := request.budget) is None:
        raise ConfigError(unknown_free_memory(request.device.name))
    records = records_of(request.architecture.text, request.device.name)
    return corrected_estimator(traced_estimator(request, budget), records)


def traced_estimator(request: Request, budget: DeviceBudget) -> Estimator:
    """Predicts the memory of its plans by the trace alone.

    Says on the live line what it sizes: it may have to trace steps.
    """
    architecture, device = request.architecture, request.device
    estimate = estimator(architecture, budget, batches_of(architecture, request.facts))

    def sized(run: RunConfig, plan: Plan, *, complete: bool = False) -> Memory:
        describe(f"planning: {_described(run, plan, device)}")
        return estimate(run, plan, complete=complete)

    return sized


def _described(run: RunConfig, plan: Plan, device: Device) -> str:
    shared = plan.sharing
    how = f"{METHODS[run.tuning.mode]}, {label_of(shared.engine, shared.replicas, shared.offload)}"
    return f"{how}, micro-batch {plan.batch.micro:,} on {shared.world_size} x {device.name}"
