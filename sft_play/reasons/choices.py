"""Why the batch, the engine and what is kept in memory are as they are."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sft_play.parts import SAID
from sft_play.plan import HostMemory, Plan
from sft_play.reasons.reason import Reason
from sft_play.units import counted, format_bytes

CAUSES = {"config": "as set in the config", "exceed": "since nothing else fits"}


class EffectiveBatch(Reason):
    """The equation of the effective batch."""

    plan: Plan

    def __str__(self) -> str:
        plan = self.plan
        words = "tokens" if plan.rows.packing else "sequences"
        ranks = ranks_text(plan.sharing.world_size, plan.sharing.sequence_ranks)
        return (
            f"effective batch {plan.batch.effective:,} {words} = micro-batch "
            f"{plan.batch.micro:,} x accumulation {plan.batch.accumulation} x {ranks}"
        )


def ranks_text(processes: int, sequence_ranks: int) -> str:
    """What has micro-batches of its own: each process, or each group that divides the tokens of one."""
    if sequence_ranks == 1:
        return counted(processes, "process")
    return f"{counted(processes // sequence_ranks, 'group')} of {counted(sequence_ranks, 'process')}"


def group_of(values: Mapping[str, Any]) -> int:
    """How many processes divide the tokens of a micro-batch, by the JSON of a plan or of a run."""
    return values.get("sequence_ranks") or 1  # an older run, or a plan that was refused, says nothing of it


class Dealing(Reason):
    """How many tokens a micro-batch has, and how its rows lie."""

    plan: Plan

    def __str__(self) -> str:
        tokens = f"at most {self.plan.rows.most_tokens:,} tokens in a micro-batch"
        if self.plan.sharing.divides_tokens:
            tokens += f", divided among {self.plan.sharing.sequence_ranks} processes"
        if self.plan.rows.joined:
            return f"{tokens}: rows joined end to end, none padded"
        return f"{tokens}: rows of similar length, padded to the longest"


@dataclass(frozen=True, kw_only=True)
class OtherKind:
    """The largest micro-batch that fits with another engine, or with other activations."""

    size: int
    engine: str | None = None  # its label, if it differs
    activations: str | None = None  # if they differ, as in a plan

    def __str__(self) -> str:
        """How a plan of this kind differs from the chosen one."""
        parts = [f"with {self.engine}"] if self.engine else []
        parts += [f"with activations {SAID[self.activations]}"] if self.activations else []
        return " and ".join(parts)


class MicroBatch(Reason, kw_only=True):
    """Why not a larger micro-batch; of the chosen kind, unless only others have one that fits."""

    size: int
    timed: bool  # whether speed is predicted
    fits: int | None = None  # the largest of the chosen kind that fits
    whole_step: bool = False  # all rows of a step at once
    misfit: int | None = None  # the next larger one, which does not fit
    ran_out: bool = False  # as an earlier run has shown
    other: OtherKind | None = None

    def __str__(self) -> str:
        name = f"micro-batch {self.size:,}"
        verdict = "predicted to be slower" if self.timed else "not faster"
        if self.fits:
            return f"{name}: up to {self.fits:,} would fit, which is {verdict}"
        if self.whole_step:
            return f"{name}: all rows of a step at once"
        text = f"{name}: the largest that the config allows"
        if self.misfit:
            shown = ", as an earlier run has shown" if self.ran_out else ""
            text = f"{name}: {self.misfit:,} would not fit{shown}"
        if self.other:
            return f"{text}; {self.other}, up to {self.other.size:,} would, which is {verdict}"
        return text


class Unsized(Reason):
    """The micro-batch of a model whose memory cannot be predicted."""

    given: bool

    def __str__(self) -> str:
        if self.given:
            return "micro-batch as set in the config"
        return "the smallest micro-batch, since this model's memory cannot be predicted"


class Activations(Reason):
    """What becomes of activations, and why."""

    activations: str  # as in a plan
    cause: Literal["config", "fit", "exceed", "faster"]
    kept: int = 0  # that keep theirs, though others are recomputed
    layers: int = 0  # of the model, if some do
    device: str = "cuda"  # or "cpu"
    host: HostMemory | None = None  # of a GPU that offloads what they are recomputed from

    def __str__(self) -> str:
        if self.kept:
            return (
                f"gradient checkpointing in {self.layers - self.kept} of {self.layers} layers: "
                f"stored activations of more than the last {self.kept} would exceed the budget"
            )
        if self.activations == "offload":
            return self._in_ram()
        name = f"gradient checkpointing {'off' if self.activations == 'keep' else 'on'}"
        return {
            "config": f"{name}, as set in the config",
            "fit": f"{name}: activations fit, and recomputing them costs a third more compute",
            "exceed": f"{name}: stored activations would exceed the budget",
            "faster": f"{name}: predicted to be faster, since larger micro-batches fit",
        }[self.cause]

    def _in_ram(self) -> str:
        """What becomes of the inputs from which layers are recomputed."""
        if self.device == "cpu":
            return (
                "train.activations=offload: layers are recomputed from their inputs; a CPU has no other "
                "memory, so this saves no more than recompute"
            )
        return (
            f"gradient checkpointing on, with layer inputs in RAM{_needs(self.host)}, {CAUSES[self.cause]}: "
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


class Tiles(Reason):
    """MLPs compute the tokens of a micro-batch in tiles, and why."""

    tiles: int  # of the largest micro-batch
    tokens: int  # of a tile
    cause: Literal["config", "exceed"]

    def __str__(self) -> str:
        return (
            f"MLPs in {self.tiles} tiles of {self.tokens:,} tokens, {CAUSES[self.cause]}: one tile of "
            "intermediates is held at a time, and recomputed in the backward pass"
        )


class EngineChoice(Reason, kw_only=True):
    """The engine, and what another one would need with the same micro-batch; labels of both."""

    engine: str
    principle: str  # what the engine does to the memory of a process
    trades_speed: bool  # for memory
    world_size: int
    replicas: int = 1  # of the model, each divided inside a machine
    exchanges_once: bool = False  # whether gradients wait for the last micro-batch of a step
    other: str | None = None
    more_bytes: int = 0  # that the other one needs; negative if it needs less
    slower: float | None = None  # how many times as long the other one takes, if longer
    alone: bool = False  # whether no other engine fits that the config allows

    def __str__(self) -> str:
        choice = f"{self.engine} over {self.world_size} processes"
        if self.replicas > 1:
            choice += f", with a copy of the model on each of {self.replicas} machines"
        if self.exchanges_once:
            choice += ", which exchange gradients once per step"
        if self.other is None:
            return f"{choice}: {self.principle}; no other engine fits" if self.alone else choice
        longer = f" and take {self.slower:.2f} times as long" if self.slower else ""
        size = format_bytes(abs(self.more_bytes))
        if self.trades_speed and self.more_bytes >= 0 and not longer:
            return f"{choice}: {self.principle}, which saves {size} over {self.other}"
        would = (f"save {size}" if self.more_bytes < 0 else f"need {size} more") + longer
        return f"{choice}: {self.principle}; {self.other} would {would}"


class WeightsAlone(Reason):
    """Engines that were left out since what a process always holds is more than its memory."""

    engines: str  # labels
    held_bytes: int  # by the one that holds least
    with_states: bool = False  # also gradients and states: the weights alone would be within it

    def __str__(self) -> str:
        held = "weights, gradients and optimizer states" if self.with_states else "the weights"
        size = format_bytes(self.held_bytes)
        return f"{self.engines} ruled out: {held} alone need at least {size} per process"


class GatheredWeights(Reason):
    """Whether weights stay gathered from the forward to the backward pass, and why."""

    # "kept", "freed": as the config says; "faster": kept; "exceed", "tie", "unknown": freed
    cause: Literal["kept", "freed", "faster", "exceed", "tie", "unknown"]
    saved_share: float = 0.0  # of a step's predicted time

    def __str__(self) -> str:
        kept = "weights stay gathered from the forward to the backward pass"
        freed = "weights are gathered again for the backward pass"
        saved = f"a step is predicted to take {self.saved_share:.0%} less time"
        return {
            "kept": f"{kept}, as set in the config or as the run began",
            "freed": f"{freed}, as set in the config or as the run began",
            "faster": f"{kept}, since that fits: {saved}",
            "exceed": f"{freed}: keeping them would exceed the budget",
            "tie": f"{freed}: keeping them would save no more than 1% of a step",
            "unknown": f"{freed}: what keeping them would save is unknown",
        }[self.cause]


class Offload(Reason):
    """What is in RAM, and why: the config says so, or nothing else fits."""

    device: str  # "cuda" or "cpu"
    engine: str  # its label
    cause: Literal["config", "exceed"]
    host: HostMemory | None  # on a GPU whose memory is predicted
    held: str = "weights, gradients and optimizer states"

    def __str__(self) -> str:
        if self.device == "cpu":
            return "parallel.offload=ram: a CPU has no other memory, so this saves nothing"
        return (
            f"{self.held} in RAM{_needs(self.host)}, {CAUSES[self.cause]}: {self.engine} copies a layer at a "
            "time to the GPU, and the CPU runs AdamW, which is slow; pinned copies and their overlap have "
            "not been measured on a GPU"
        )


class StatesOnDisk(Reason):
    """The optimizer's states, and of some engines weights, are in files, as the config says."""

    files: str  # what is there
    folder: str
    saved_bytes: int  # of RAM, of all processes of a machine
    text = (
        "{files} in files in {folder}, which saves {saved_bytes} of RAM; the predicted seconds do not "
        "include reading and writing them in each step"
    )


class TokensDivided(Reason):
    """Whether processes divide the tokens of a micro-batch, which nobody asked for, and the other ways."""

    ranks: int  # of a group; 1: rows stay whole
    # ranks of other groups that fit, and how many times as long they take
    slower: tuple[tuple[int, float], ...]
    ruled_out: bool  # whether larger groups cannot be faster, whatever they take

    def __str__(self) -> str:
        others = [
            f"{times:.2f} times as long with {f'groups of {ranks}' if ranks > 1 else 'whole rows'}"
            for ranks, times in self.slower
        ]
        compared = f"a step is predicted to take {', '.join(others)}"
        larger = ["larger groups cannot be faster"] if self.ruled_out else []
        if self.ranks == 1 and others:
            return "; ".join([f"rows stay whole: {compared}, which divide their tokens", *larger])
        if self.ranks == 1:
            return "rows stay whole: groups of processes that divide their tokens cannot be faster"
        cause = "nothing else fits"
        if others:
            whole_fit = any(ranks == 1 for ranks, _ in self.slower)
            cause = compared if whole_fit else f"whole rows do not fit, and {compared}"
        chosen = f"groups of {self.ranks} processes divide the tokens of a micro-batch (sequence parallelism)"
        wait = "they wait for exchanges in every layer, which have not been measured on a GPU"
        return "; ".join([f"{chosen}, since {cause}: {wait}", *larger])
