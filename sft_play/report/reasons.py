"""The English of a plan's reasons: a template or a function for each kind of fact in `sft_play.reasons`."""

from collections.abc import Iterable, Sequence
from functools import singledispatch

from sft_play import reasons
from sft_play.plan import HostMemory, Plan
from sft_play.units import counted, format_bytes

ACTIVATIONS = {"keep": "kept", "recompute": "recomputed", "offload": "recomputed from inputs in RAM"}
# Those that need no more than their facts; sizes in bytes are written with their unit.
FROM_FACTS: dict[type[reasons.Reason], str] = {
    reasons.UnknownFreeMemory: "the free memory of {device} is unknown",
    reasons.Untraceable: "{message}",
    reasons.WeightsAlone: "out of reach: {engines}, since a process holds at least {held_bytes} of weights",
    reasons.GuardKept: "guard {bytes}: {why}",
    reasons.UnknownCapability: "compute capability unknown: kernels of {assumed[0]}.{assumed[1]} assumed",
    reasons.ProfileSource: "seconds from the profile of {device}, {source}",
    reasons.OnlyWhileBusy: "{device} was busy when measured: that does not count, and is repeated once idle",
    reasons.SecondsOfEarlierRun: "seconds in proportion to those that an earlier run measured, not predicted",
    reasons.AssumedRows: (
        "no training rows found: planned for {rows:,} rows of {tokens:,} tokens, with loss on every token"
    ),
    reasons.StatesOnDisk: (
        "{files} in files in {folder}, which takes {saved_bytes} less RAM; the predicted seconds leave out "
        "that each step reads and writes them"
    ),
    reasons.Decomposed: (
        "{init}: every adapted weight is decomposed before the first step; the saved adapter has twice the "
        "rank"
    ),
    reasons.Unproven: "{label} is off, since no proof on a GPU has seen it win yet; {setting} takes it",
    reasons.ScratchOffRule: "scratch of {dtype} products follows no rule on this CPU, off by {worst:.0%}",
    reasons.Noise: "NEFTune: noise within {alpha:g} / sqrt(tokens of a row x hidden size) on the embeddings",
    reasons.Corrected: "corrected by an earlier probe of such a step: memory above the weights x {ratio:.3f}",
    reasons.FourBitBase: (
        "{share:.0%} of the weights of the base are 4-bit ({bytes} in all, {sixteen_bit_bytes} in 16 bit)"
    ),
}
KEPT = "weights stay gathered from the forward to the backward pass"
FREED = "weights are gathered again for the backward pass"
RAN_OUT = "in an earlier run of this kind, memory ran out with {tokens:,} tokens in a micro-batch"
# Those of which one fact, of this name, chooses the sentence.
BY_FACT: dict[type[reasons.Reason], tuple[str, dict[str, str]]] = {
    reasons.Precision: ("cause", {
        "config": "{precision} autocast, as set in the config",
        "cpu": "fp32 on the CPU",
        "device": "{precision} autocast, which {device} supports",
    }),
    reasons.MasterWeights: ("dtype", {
        "float32": (
            "fp32 master weights: pure bf16 (model.dtype=bfloat16) would save {bytes} of {place}, but lose "
            "updates below 1/512 of a weight"
        ),
        "bfloat16": (
            "pure bf16 (model.dtype=bfloat16): saves {bytes} of {place} over fp32 master weights, but "
            "loses updates below 1/512 of a weight"
        ),
    }),
    reasons.RanOutBefore: ("outcome", {
        "again": f"{RAN_OUT}; the config allows no smaller plan that fits, so this one is tried again",
        "more_free": f"{RAN_OUT}, when less of it was free",
        "smaller": RAN_OUT,
    }),
    reasons.AttentionKernel: ("calls", {
        "one": "attention: {kernel}, one call for all rows of a micro-batch",
        "each_row": "attention: {kernel}, a call for each row",
        "padded": "attention: {kernel}, rows are padded",
    }),
    reasons.CompiledLayers: ("compiled", {
        "off": "layers are not compiled, since no proof on a GPU has seen it win yet; train.compile=true "
        "compiles them",
        "on": "layers are compiled, as set in the config; memory and seconds are predicted for layers "
        "that are not, and the first step takes longer",
        "float8": "layers are compiled and multiply in float8, as set in the config; memory and seconds are "
        "predicted for layers that do neither, and the first step takes longer",
    }),
    reasons.GatheredWeights: ("cause", {
        "kept": f"{KEPT}, as set in the config or as the run began",
        "freed": f"{FREED}, as set in the config or as the run began",
        "faster": f"{KEPT}, since that fits: a step is predicted to take {{saved_share:.0%}} less time",
        "exceed": f"{FREED}: keeping them would exceed the budget",
        "tie": f"{FREED}: keeping them would save no more than 1% of a step",
        "unknown": f"{FREED}: what keeping them would save is unknown",
    }),
    reasons.LayerKernels: ("kernels", {
        "off": "Liger's kernels are off, since no proof on a GPU has seen them win yet; train.kernels=liger "
        "takes {saved_bytes} less at the same micro-batch",
        "liger": "Liger's kernels compute {modules} norms, rotary embeddings and gated layers, which takes "
        "{saved_bytes} less than ours",
    }),
}  # fmt: skip


def link_text(links: Sequence[float]) -> str:
    """Speeds of links (`planning.speed.links_of`) in words."""
    places = ("between devices",) if len(links) == 1 else ("inside a machine", "between machines")
    return ", ".join(f"{link / 1e9:g} GB/s {place}" for link, place in zip(links, places, strict=True))


def sentences(found: Iterable[reasons.Reason]) -> tuple[str, ...]:
    """The reasons as sentences, without a full stop."""
    return tuple(map(sentence, found))


@singledispatch
def sentence(reason: reasons.Reason) -> str:
    """A reason as a sentence, without a full stop."""
    facts, kind = vars(reason), type(reason)
    sizes = {name: format_bytes(value) for name, value in facts.items() if name.endswith("bytes")}
    chooses, texts = BY_FACT.get(kind, ("", {}))
    template = texts[facts[chooses]] if texts else FROM_FACTS[kind]
    return template.format(**facts | sizes)


def batch_sentence(plan: Plan) -> str:
    """The equation of the effective batch."""
    words = "tokens" if plan.rows.packing else "sequences"
    ranks = ranks_text(plan.sharing.world_size, plan.sharing.sequence_ranks)
    return (
        f"effective batch {plan.batch.effective:,} {words} = micro-batch {plan.batch.micro:,} x "
        f"accumulation {plan.batch.accumulation} x {ranks}"
    )


def ranks_text(processes: int, sequence_ranks: int) -> str:
    """What has micro-batches of its own: each process, or each group that divides the tokens of one."""
    if sequence_ranks == 1:
        return counted(processes, "process")
    return f"{counted(processes // sequence_ranks, 'group')} of {counted(sequence_ranks, 'process')}"


@sentence.register
def _tokens_divided(reason: reasons.TokensDivided) -> str:
    others = [
        f"{times:.2f} times as long with {f'groups of {ranks}' if ranks > 1 else 'whole rows'}"
        for ranks, times in reason.slower
    ]
    compared = f"a step is predicted to take {', '.join(others)}"
    larger = ["larger groups cannot be faster"] if reason.ruled_out else []
    if reason.ranks == 1 and others:
        return "; ".join([f"rows stay whole: {compared}, which divide their tokens", *larger])
    if reason.ranks == 1:
        return "rows stay whole: groups of processes that divide their tokens cannot be faster"
    cause = "nothing else fits"
    if others:
        whole_fit = any(ranks == 1 for ranks, _ in reason.slower)
        cause = compared if whole_fit else f"whole rows do not fit, and {compared}"
    chosen = f"groups of {reason.ranks} processes divide the tokens of a micro-batch (sequence parallelism)"
    wait = "they wait for exchanges in every layer, which were never measured on a GPU"
    return "; ".join([f"{chosen}, since {cause}: {wait}", *larger])


@sentence.register
def _effective_batch(reason: reasons.EffectiveBatch) -> str:
    return batch_sentence(reason.plan)


@sentence.register
def _dealing(reason: reasons.Dealing) -> str:
    tokens = f"at most {reason.plan.rows.most_tokens:,} tokens in a micro-batch"
    if reason.plan.sharing.divides_tokens:
        tokens += f", divided among {reason.plan.sharing.sequence_ranks} processes"
    if reason.plan.rows.joined:
        return f"{tokens}: rows joined end to end, none padded"
    return f"{tokens}: rows of similar length, padded to the longest"


@sentence.register
def _micro_batch(reason: reasons.MicroBatch) -> str:
    name = f"micro-batch {reason.size:,}"
    verdict = "predicted to be slower" if reason.timed else "not faster"
    if reason.fits:
        return f"{name}: up to {reason.fits:,} would fit, which is {verdict}"
    if reason.whole_step:
        return f"{name}: all rows of a step at once"
    text = f"{name}: the largest that the config allows"
    if reason.misfit:
        shown = ", as an earlier run has shown" if reason.ran_out else ""
        text = f"{name}: {reason.misfit:,} would not fit{shown}"
    if reason.other:
        return f"{text}; {_with(reason.other)}, up to {reason.other.size:,} would, which is {verdict}"
    return text


def _with(other: reasons.OtherKind) -> str:
    """How the kind of a plan differs from that of the chosen one."""
    parts = [f"with {other.engine}"] if other.engine else []
    if other.activations:
        parts.append(f"with activations {ACTIVATIONS[other.activations]}")
    return " and ".join(parts)


@sentence.register
def _activations(reason: reasons.Activations) -> str:
    if reason.kept_layers:
        return (
            f"gradient checkpointing in {reason.layers - reason.kept_layers} of {reason.layers} layers: "
            f"stored activations of more than the last {reason.kept_layers} would exceed the budget"
        )
    if reason.activations == "offload":
        return _activations_in_ram(reason)
    name = f"gradient checkpointing {'off' if reason.activations == 'keep' else 'on'}"
    return {
        "config": f"{name}, as set in the config",
        "fit": f"{name}: activations fit, and recomputing them costs a third more compute",
        "exceed": f"{name}: stored activations would exceed the budget",
        "faster": f"{name}: predicted to be faster, since larger micro-batches fit",
    }[reason.cause]


def _activations_in_ram(reason: reasons.Activations) -> str:
    """What becomes of the inputs from which layers are recomputed."""
    if reason.device == "cpu":
        return (
            "train.activations=offload: layers are recomputed from their inputs; a CPU has no other memory, "
            "so this saves no more than recompute"
        )
    cause = "as set in the config" if reason.cause == "config" else "since nothing else fits"
    return (
        f"gradient checkpointing on, the inputs of layers in RAM{_needs(reason.host)}, {cause}: they are "
        "copied there and back, which was never measured on a GPU"
    )


@sentence.register
def _tiles(reason: reasons.Tiles) -> str:
    cause = "as set in the config" if reason.cause == "config" else "since nothing else fits"
    return (
        f"MLPs in {reason.tiles} tiles of {reason.tokens:,} tokens, {cause}: of what is between their layers "
        "a tile exists at a time, and is computed once more"
    )


@sentence.register
def _engine(reason: reasons.EngineChoice) -> str:
    choice = f"{reason.engine} over {reason.world_size} processes"
    if reason.replicas > 1:
        choice += f", with a copy of the model on each of {reason.replicas} machines"
    if reason.exchanges_once:
        choice += ", which exchange gradients once per step"
    if reason.other is None:
        return f"{choice}: {reason.principle}; no other engine fits" if reason.alone else choice
    longer = f" and take {reason.slower:.2f} times as long" if reason.slower else ""
    if reason.trades_speed and reason.more_bytes >= 0 and not longer:
        saved = format_bytes(reason.more_bytes)
        return f"{choice}: {reason.principle}, which saves {saved} over {reason.other}"
    size = format_bytes(abs(reason.more_bytes))
    would = (f"save {size}" if reason.more_bytes < 0 else f"need {size} more") + longer
    return f"{choice}: {reason.principle}; {reason.other} would {would}"


@sentence.register
def _offload(reason: reasons.Offload) -> str:
    if reason.device == "cpu":
        return "parallel.offload=ram: a CPU has no other memory, so this saves nothing"
    cause = "as set in the config" if reason.cause == "config" else "since nothing else fits"
    return (
        f"{reason.held} in RAM{_needs(reason.host)}, {cause}: {reason.engine} "
        "copies a layer at a time to the GPU, and the CPU runs AdamW, which is slow; pinned copies and their "
        "overlap were never measured on a GPU"
    )


def _needs(host: HostMemory | None) -> str:
    """What offloading needs of RAM, in brackets."""
    if host is None:
        return ""
    limit = "; how much the machine has is unknown"
    if host.budget_bytes is not None:
        limit = f" of {format_bytes(host.budget_bytes)} that may be used"
    own = f"{counted(host.processes, 'process')}, with {format_bytes(host.own_bytes)} assumed for each itself"
    return f" ({format_bytes(host.needed_bytes)}{limit}; {own})"


@sentence.register
def _unsized(reason: reasons.Unsized) -> str:
    if reason.given:
        return "micro-batch as set in the config"
    return "the smallest micro-batch, since this model's memory cannot be predicted"


@sentence.register
def _learning_rate(reason: reasons.LearningRate) -> str:
    if reason.rule == "none" or reason.reference is None:
        return f"learning rate {reason.given:g} as given, not scaled"
    factor = reason.used / reason.given
    return (
        f"learning rate {reason.given:g} x {factor:.3g} = {reason.used:.3g}: {reason.rule} scaling from "
        f"batch {reason.reference} to {reason.effective}"
    )


@sentence.register
def _memory_limit(reason: reasons.MemoryLimit) -> str:
    less = f", but only {format_bytes(reason.free_bytes)} are free" if reason.free_bytes is not None else ""
    return f"each process may use {reason.asked_gib:g} GiB (parallel.memory_gib){less}"


@sentence.register
def _assumed(reason: reasons.Assumed) -> str:
    return f"assumed, not measured: {' and '.join(reason.parts)} of each process"


@sentence.register
def _prediction_errors(reason: reasons.PredictionErrors) -> str:
    name = "compute capability {}.{}".format(*reason.capability)
    if not reason.runs:
        return f"no measurements on {name} are published, so prediction errors there are unknown"
    errors = ", ".join(f"{what} {_range(*one)}" for what, one in reason.errors)
    weights = "4-bit" if reason.quantized else "16-bit"
    runs = counted(reason.runs, "published run")
    return f"prediction errors in {runs} with {weights} weights and fixed segments on {name}: {errors}"


def _range(lowest: float, highest: float) -> str:
    text = f"{lowest:+.2%}"
    return text if lowest == highest else f"{text} to {highest:+.2%}"


@sentence.register
def _communication(reason: reasons.Communication) -> str:
    if reason.measured:
        return f"communication: as measured between {reason.processes} processes here"
    later = f"; the first run of {reason.processes} processes measures it" if reason.measured_later else ""
    if reason.links:
        return f"communication: derived from the data sheet ({link_text(reason.links)}), not measured{later}"
    return f"communication: not counted, since the link between processes is unknown{later}"


@sentence.register
def _drawn_lengths(reason: reasons.DrawnLengths) -> str:
    found = (
        f"no training rows are here: {reason.rows:,} are assumed, half of them up to {reason.median:,} "
        f"tokens and 95% up to {reason.p95:,} (lognormal), the longest {reason.longest:,}, with loss on "
        "every token"
    )
    cut = {"drop": "left out", "truncate": "cut"}.get(reason.overlong, "split")
    longer = (
        f"; {counted(reason.longer, 'row')} above the limit {'is' if reason.longer == 1 else 'are'} {cut}"
    )
    return found + (longer if reason.longer else "")


@sentence.register
def _optimizer_states(reason: reasons.OptimizerStates) -> str:
    found = f"{reason.optimizer}: {format_bytes(reason.bytes)} of optimizer states"
    if reason.paged_bytes is None:
        return f"{found} in each process"
    if reason.paged_bytes <= 0:
        return f"{found}, none of them paged: only those of large weights are"
    return (
        f"{found} on the GPU, and about {format_bytes(reason.paged_bytes)} that move to RAM while the GPU is "
        "full, which takes time that is not counted below"
    )


@sentence.register
def _ranks(reason: reasons.Ranks) -> str:
    return f"rank {reason.rank}, but {', '.join(f'{rank} for {name}' for name, rank in reason.others)}"


@sentence.register
def _lora_plus(reason: reasons.LoraPlus) -> str:
    return f"LoRA+: learning rate {reason.rate * reason.ratio:.2e} for B, {reason.rate:.2e} for A"


@sentence.register
def _padded(reason: reasons.Padded) -> str:
    if reason.cause == "config":
        return "rows are padded because train.padding_free=false"
    return f"rows are padded: {padding_cause(reason)}"


def padding_cause(reason: reasons.Padded) -> str:
    """Why joined rows would see each other."""
    return {
        "config": "train.padding_free=false",
        "boundaries": f"{reason.what} passes no row boundaries to its attention",
        "layers": f"layers of type {reason.what} would mix them",
        "attention": f"{reason.what} attention does not support row boundaries",
    }[reason.cause]


@sentence.register
def _new_tokens(reason: reasons.NewTokens) -> str:
    where = "tied embedding" if reason.tied else "embedding and output head"
    trained = f"{reason.parameters:,} parameters of the {where} are trained for them"
    return f"{counted(reason.tokens, 'new token')}: {trained}"


@sentence.register
def _trained_whole(reason: reasons.TrainedWhole) -> str:
    return (
        f"{reason.parameters:,} parameters of {counted(reason.modules, 'module')} are trained whole "
        f"(tuning.lora.modules_to_save: {', '.join(reason.names)})"
    )
