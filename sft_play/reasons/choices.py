"""Sentences, without a full stop: why the batch, the engine and what is kept in memory are as they are."""

from collections.abc import Mapping
from typing import Any, Literal

from sft_play.parts import SAID
from sft_play.plan import HostMemory, Plan
from sft_play.units import counted, format_bytes

CAUSES = {"config": "as set in the config", "exceed": "since nothing else fits"}


def effective_batch(plan: Plan) -> str:
    """The equation of the effective batch."""
    words = "tokens" if plan.rows.packing else "sequences"
    ranks = ranks_text(plan.sharing.world_size, plan.sharing.sequence_ranks)
    return (
        f"effective batch {plan.batch.effective:,} {words} = micro-batch {micro_batch_of(plan)} "
        f"x accumulation {plan.batch.accumulation} x {ranks}"
    )


def micro_batch_of(plan: Plan) -> str:
    """The first factor of that equation."""
    return mean_micro_batch(plan.batch.effective, plan.batch.accumulation * plan.sharing.data_ranks)


def mean_micro_batch(effective: int, micro_batches: int) -> str:
    """The average size of the micro-batches of a step, which the plan rounds up to whole rows."""
    return f"{effective / micro_batches:,.2f}".removesuffix(".00")


def ranks_text(processes: int, sequence_ranks: int) -> str:
    """What has micro-batches of its own: each process, or each group that divides the tokens of one."""
    if sequence_ranks == 1:
        return counted(processes, "process")
    return f"{counted(processes // sequence_ranks, 'group')} of {counted(sequence_ranks, 'process')}"


def group_of(values: Mapping[str, Any]) -> int:
    """How many processes divide the tokens of a micro-batch, by the JSON of a plan or of a run."""
    return values.get("sequence_ranks") or 1  # an older run, or a plan that was refused, says nothing of it


def rows_in_a_micro_batch(plan: Plan) -> str:
    """How many tokens a micro-batch has, and how its rows lie."""
    tokens = f"at most {plan.rows.most_tokens:,} tokens in a micro-batch"
    if plan.sharing.sequence_parallel:
        tokens += f", divided among {plan.sharing.sequence_ranks} processes"
    if plan.rows.joined:
        return f"{tokens}: rows joined end to end, none padded"
    return f"{tokens}: rows of similar length, padded to the longest"


def micro_batch(
    size: int,
    *,
    timed: bool,  # whether speed is predicted
    fits: int | None = None,  # the largest of the chosen kind that fits
    whole_step: bool = False,  # all rows of a step at once
    misfit: int | None = None,  # the next larger one, which does not fit
    ran_out: bool = False,  # as an earlier run has shown
    other: int | None = None,  # the largest that fits of another kind, whose difference the next two say
    engine: str | None = None,  # its label, if it differs
    activations: str | None = None,  # if they differ, as in a plan
) -> str:
    """Why not a larger micro-batch; of the chosen kind, unless only others have one that fits."""
    name = f"micro-batch {size:,}"
    verdict = "predicted to be slower" if timed else "not faster"
    if fits:
        return f"{name}: up to {fits:,} would fit, which is {verdict}"
    if whole_step:
        return f"{name}: all rows of a step at once"
    text = f"{name}: the largest that the config allows"
    if misfit:
        shown = ", as an earlier run has shown" if ran_out else ""
        text = f"{name}: {misfit:,} would not fit{shown}"
    if other:
        kind = [f"with {engine}"] if engine else []
        kind += [f"with activations {SAID[activations]}"] if activations else []
        return f"{text}; {' and '.join(kind)}, up to {other:,} would, which is {verdict}"
    return text


def unsized(given: bool) -> str:
    """The micro-batch of a model whose memory cannot be predicted."""
    if given:
        return "micro-batch as set in the config"
    return "the smallest micro-batch, since this model's memory cannot be predicted"


def recomputing(recomputed: bool, cause: Literal["config", "fit", "exceed", "faster", "gathered"]) -> str:
    """Whether activations are recomputed, and why."""
    name = f"gradient checkpointing {'on' if recomputed else 'off'}"
    return {
        "config": f"{name}, as set in the config",
        "fit": f"{name}: activations fit, and recomputing them costs a third more compute",
        "exceed": f"{name}: stored activations would exceed the budget",
        "faster": f"{name}: predicted to be faster, since larger micro-batches fit",
        "gathered": f"{name}: predicted to be faster, since weights can then stay gathered",
    }[cause]


def partly_recomputing(kept: int, layers: int) -> str:
    """Some of the layers keep their activations, since not all of them can."""
    return (
        f"gradient checkpointing in {layers - kept} of {layers} layers: "
        f"stored activations of more than the last {kept} would exceed the budget"
    )


def inputs_in_ram(device: str, cause: Literal["config", "exceed"], host: HostMemory | None = None) -> str:
    """What becomes of the inputs from which layers are recomputed: a GPU offloads them."""
    if device == "cpu":
        return (
            "train.activations=offload: layers are recomputed from their inputs; a CPU has no other "
            "memory, so this saves no more than recompute"
        )
    return (
        f"gradient checkpointing on, with layer inputs in RAM{_needs(host)}, {CAUSES[cause]}: "
        "the time to copy them there and back has not been measured on a GPU"
    )


def _needs(host: HostMemory | None) -> str:
    """What offloading needs of RAM, in brackets."""
    if host is None:
        return ""
    limit = "; how much the machine has is unknown"
    if host.budget_bytes is not None:
        limit = f" of {format_bytes(host.budget_bytes)} available"
    own = f"{format_bytes(host.own_bytes)} of it assumed for each of {counted(host.processes, 'process')}"
    return f" ({format_bytes(host.needed_bytes)}{limit}; {own})"


def tiles(number: int, tokens: int, cause: Literal["config", "exceed"]) -> str:
    """MLPs compute the tokens of the largest micro-batch in so many tiles, and why."""
    return (
        f"MLPs in {number} tiles of {tokens:,} tokens, {CAUSES[cause]}: one tile of "
        "intermediates is held at a time, and recomputed in the backward pass"
    )


def waiting(share: float, *, may_pack: bool) -> str:
    """How much of a step an average process waits for the one with the most tokens."""
    remedies = "a larger train.effective_batch_size" + ", or train.packing=true," * may_pack
    wait = f"an average process waits {share:.0%} of a step for the one with the most tokens"
    return f"{wait}; {remedies} would even them out"


def engine(
    *,
    engine: str,
    principle: str,  # what the engine does to the memory of a process
    trades_speed: bool,  # for memory
    world_size: int,
    replicas: int = 1,  # of the model, each divided inside a machine
    exchanges_once: bool = False,  # whether gradients wait for the last micro-batch of a step
    other: str | None = None,
    more_bytes: int = 0,  # that the other one needs; negative if it needs less
    slower: float | None = None,  # how many times as long the other one takes, if longer
    alone: bool = False,  # whether no other engine fits that the config allows
) -> str:
    """The engine, and what another one would need with the same micro-batch; labels of both."""
    choice = f"{engine} over {world_size} processes"
    if replicas > 1:
        choice += f", with a copy of the model on each of {replicas} machines"
    if exchanges_once:
        choice += ", which exchange gradients once per step"
    if other is None:
        return f"{choice}: {principle}; no other engine fits" if alone else choice
    longer = f" and take {slower:.2f} times as long" if slower else ""
    size = format_bytes(abs(more_bytes))
    if trades_speed and more_bytes >= 0 and not longer:
        return f"{choice}: {principle}, which saves {size} over {other}"
    would = (f"save {size}" if more_bytes < 0 else f"need {size} more") + longer
    return f"{choice}: {principle}; {other} would {would}"


def ruled_out(engines: str, held_bytes: int, *, with_states: bool) -> str:
    """Engines, by label, left out since what a process of the leanest always holds is more than its memory.

    With gradients and states, if the weights alone would be within it.
    """
    held = "weights, gradients and optimizer states" if with_states else "the weights"
    return f"{engines} ruled out: {held} alone need at least {format_bytes(held_bytes)} per process"


# "kept", "freed": as the config says; "faster": kept; "exceed", "tie", "unknown": freed
GatheredCause = Literal["kept", "freed", "faster", "exceed", "tie", "unknown"]


def gathered_weights(cause: GatheredCause, saved_share: float) -> str:
    """Whether weights stay gathered until the backward pass, why, and which share of a step that saves."""
    kept = "weights stay gathered from the forward to the backward pass"
    freed = "weights are gathered again for the backward pass"
    saved = f"a step is predicted to take {saved_share:.0%} less time"
    return {
        "kept": f"{kept}, as set in the config or as the run began",
        "freed": f"{freed}, as set in the config or as the run began",
        "faster": f"{kept}, since that fits: {saved}",
        "exceed": f"{freed}: keeping them would exceed the budget",
        "tie": f"{freed}: keeping them would save no more than 1% of a step",
        "unknown": f"{freed}: what keeping them would save is unknown",
    }[cause]


def offload(
    device: str, engine: str, cause: Literal["config", "exceed"], host: HostMemory | None, held: str
) -> str:
    """What is in RAM, and why: the config says so, or nothing else fits; `host` if it is predicted."""
    if device == "cpu":
        return "parallel.offload=ram: a CPU has no other memory, so this saves nothing"
    return (
        f"{held} in RAM{_needs(host)}, {CAUSES[cause]}: {engine} copies a layer at a "
        "time to the GPU, and the CPU runs AdamW, which is slow; pinned copies and their overlap have "
        "not been measured on a GPU"
    )


def states_on_disk(files: str, folder: str, saved_bytes: int) -> str:
    """The optimizer's states, and of some engines weights, are in files, which saves RAM of a machine."""
    return (
        f"{files} in files in {folder}, which saves {format_bytes(saved_bytes)} of RAM; the predicted "
        "seconds do not include reading and writing them in each step"
    )


def sequence_parallel(ranks: int, slower: list[tuple[int, float]], ruled_out: bool) -> str:
    """Whether processes divide the tokens of a micro-batch, which nobody asked for, and the other ways.

    Args:
        ranks: of a group; 1: rows stay whole.
        slower: the ranks of other groups that fit, and how many times as long they take.
        ruled_out: whether larger groups cannot be faster, whatever they take.
    """
    others = [
        f"{times:.2f} times as long with {f'groups of {other}' if other > 1 else 'whole rows'}"
        for other, times in slower
    ]
    compared = f"a step is predicted to take {', '.join(others)}"
    larger = ["larger groups cannot be faster"] if ruled_out else []
    if ranks == 1 and others:
        return "; ".join([f"rows stay whole: {compared}, which divide their tokens", *larger])
    if ranks == 1:
        return "rows stay whole: groups of processes that divide their tokens cannot be faster"
    cause = "nothing else fits"
    if others:
        whole_fit = any(other == 1 for other, _ in slower)
        cause = compared if whole_fit else f"whole rows do not fit, and {compared}"
    chosen = f"groups of {ranks} processes divide the tokens of a micro-batch (sequence parallelism)"
    wait = "they wait for exchanges in every layer, which have not been measured on a GPU"
    return "; ".join([f"{chosen}, since {cause}: {wait}", *larger])
