"""Derives the memory of a run from traced steps: other micro-batch sizes, the budget, fragmentation. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sft_play.engines.base import Division, Engine
from sft_play.engines.registry import ALONE
from sft_play.plan import HighestBatches, HostMemory, Memory
from sft_play.sizing.estimate.allocator import replay_steps
from sft_play.sizing.estimate.budget import HANDLES, DeviceBudget
from sft_play.sizing.step import MicroBatch, RunBatches
from sft_play.timeline import TERMS, Peak, Step, StepTrace
from sft_play.work import directions

# Below this share of the budget, fragmentation cannot matter: in no replayed step with expandable segments
# and one stream did it need the other 20%. Fixed ones need more, up to a third in published runs
# (benchmarks/evidence), and so do steps of divided models, which allocate on several streams.
UNKNOWN = RunBatches()
FRAGMENTATION_MATTERS_FROM = {True: 0.8, False: 0.5}  # by whether both are so

# Of what is in RAM: what is copied to the GPU or from it. The optimizer's states stay where they are.
PINNED = ("weights", "adapters", "gradients", "activations")

Counts = tuple[int, int]  # rows, and supervised tokens


def scaled_step(
    traces: Sequence[StepTrace], counts: Sequence[Counts], wanted: Counts, evaluated: Counts
) -> Step:
    """The step of a micro-batch, from traces with the same structure.

    The size of each block is linear in the rows and in the supervised tokens, so two traces give the steps
    with the same supervised share, and three those with any share. Blocks allocated in the evaluation depend
    on the evaluation batch instead, which may be of another size. A phase's peak is the maximum over many
    sums of block sizes, hence not linear: it has a kink where another moment of the phase becomes the
    highest.
    """
    base, *others = traces
    growth = np.stack([other.sizes - base.sizes for other in others], axis=-1)
    slopes = growth @ directions(counts)  # [blocks, 2]: bytes per row and per supervised token
    change, change_in_evaluation = (
        np.rint(slopes @ np.subtract(each, counts[0])) for each in (wanted, evaluated)
    )
    growth = np.where(base.born_in("evaluation"), change_in_evaluation, change)
    return Step(base.step.timeline, np.maximum(base.sizes + growth.astype(np.int64), 0))


@dataclass(frozen=True)
class SizedStep:
    """A step, with the micro-batch and the batch of the evaluation that it is of; None stands for any.

    `first` gives the same step as the first micro-batch of several, in which gradients are born, where they
    are so large that it decides what the allocator reserves.
    """

    step: Step
    micro: MicroBatch | None = None
    evaluated: MicroBatch | None = None
    first: Callable[[], Step] | None = None


def estimate(
    sized: Sequence[SizedStep],
    device: DeviceBudget,
    engine: Engine = ALONE,
    division: Division | None = None,
    *,
    batches: RunBatches = UNKNOWN,
    complete: bool = False,
) -> Memory:
    """The memory of one process: the highest phase counts, never a sum of phases.

    Each phase counts in the step in which its peak is highest. The engine transforms the steps of a single
    process according to its division: no earlier micro-batch has left gradients at the first one of an
    optimizer step. `batches` are those of the run. With `complete`, reserved bytes are predicted, which takes
    time, also where they cannot decide.
    """
    host = host_memory([each.step for each in sized], device, engine, division)
    sized = [replace(each, step=_of_process(each, device, engine, division)) for each in sized]
    peaks_of = [each.step.peaks() for each in sized]
    step_of = {phase: _highest_in(peaks_of, phase) for phase in peaks_of[0]}
    peaks = {phase: peaks_of[number][phase] for phase, number in step_of.items()}
    saved = engine.saved_from_memory(peaks["forward"].terms)
    peaks["save"] = Peak(sum(saved.values()), saved)
    peaks = _with_workspaces(peaks, device)
    top = max(peaks, key=lambda phase: peaks[phase].bytes)
    phases = {phase: peak.bytes for phase, peak in peaks.items()}
    phase_terms = {phase: peak.terms for phase, peak in peaks.items()}
    memory = Memory(
        budget_bytes=device.budget_bytes,
        peak_bytes=peaks[top].bytes,
        peak_phase=top,
        phases=phases,
        terms={**peaks[top].terms, "context": device.context_bytes},
        phase_terms=phase_terms,
        guard_bytes=device.guard.bytes,
        host=host,
        highest=_highest(sized, [_with_workspaces(own, device) for own in peaks_of], batches),
    )
    compact = device.expandable and not any(each.step.timeline.streams.any() for each in sized)
    if device.kind == "cpu" or not (complete or _is_tight(memory, compact)):
        return memory
    # transformers' caching_allocator_warmup begins with a block of about the size of the weights
    highest = sized[step_of.get(top, 0)]
    warmup = 0 if engine.shards_weights else highest.step.peaks()["load"].terms["weights"]
    if engine is not ALONE:  # others have gradients in buffers
        highest = replace(highest, first=None)
    return replace(memory, reserved_bytes=reserved_bytes(highest, memory.peak_bytes, device, warmup))


def _of_process(sized: SizedStep, device: DeviceBudget, engine: Engine, division: Division | None) -> Step:
    """What one process among several has on its device, in blocks as large as the allocator makes them."""
    step = sized.step.rounded(device.granularity)
    if division:
        division = replace(division, room_bytes=device.budget_bytes - device.context_bytes)
        if sized.micro is not None and sized.micro.first:
            division = replace(division, accumulates=False, precedes=division.accumulates)
        step = engine.transform(step, division)
    return step.on_device()


def _highest_in(peaks_of: Sequence[Mapping[str, Peak]], *phases: str) -> int:
    """The number of the step that has the highest peak in any of these phases."""
    return max(range(len(peaks_of)), key=lambda number: max(peaks_of[number][name].bytes for name in phases))


def _with_workspaces(peaks: Mapping[str, Peak], device: DeviceBudget) -> dict[str, Peak]:
    """The peaks with cuBLAS's workspaces, which are there once a model computes."""
    found = dict(peaks)
    for phase, peak in peaks.items():
        if phase != "load":
            terms = peak.terms | {"engine": peak.terms.get("engine", 0) + device.workspace_bytes}
            found[phase] = Peak(peak.bytes + device.workspace_bytes, terms)
    return found


def _highest(
    sized: Sequence[SizedStep], peaks_of: Sequence[Mapping[str, Peak]], batches: RunBatches
) -> HighestBatches | None:
    """The batches whose steps have the highest peaks in training, and in the evaluation; None if unknown."""
    if any(each.micro is None or each.micro.place is None for each in sized):
        return None
    most = _highest_in(peaks_of, "forward", "backward", "optimizer")
    scored = _highest_in(peaks_of, "evaluation")
    micro, evaluated = sized[most].micro, sized[scored].evaluated
    assert micro and micro.place is not None
    after = batches.bytes_of(batches.held - micro.tokens, batches.held_units - micro.units)
    peaks = {**peaks_of[most], "evaluation": peaks_of[scored]["evaluation"]}
    return HighestBatches(
        train=micro.place,
        last=micro.last,
        held=batches.bytes_of(micro.held, micro.held_units),
        held_after=max(0, after),
        evaluation=evaluated.place if evaluated else None,
        phases={phase: peak.bytes for phase, peak in peaks.items()},
    )


def host_memory(
    steps: Sequence[Step], device: DeviceBudget, engine: Engine = ALONE, division: Division | None = None
) -> HostMemory | None:
    """The RAM that the processes of a GPU's machine need for what they offload; None if they do not."""
    if not any(step.timeline.in_ram for step in steps):
        return None
    saved = max(step.in_ram().bytes_of("gradients") for step in steps)
    if division:
        saved *= division.world_size
        steps = [engine.transform(step, division) for step in steps]
    peaks = [peak for step in steps for peak in _with_pinned(step.in_ram()).peaks().values()]
    highest = max(peaks, key=lambda peak: peak.bytes)
    budget = device.host
    terms = {name: size for name, size in highest.terms.items() if size}
    return HostMemory(
        budget_bytes=budget.budget_bytes,
        processes=budget.processes,
        own_bytes=budget.own_bytes,
        terms=terms,
        saved_bytes=saved,
    )


def _with_pinned(step: Step) -> Step:
    """The step with pinned blocks as large as CachingHostAllocator.h of PyTorch 2.13 makes them."""
    pinned = np.isin(step.timeline.terms, [TERMS.index(term) for term in PINNED]) & (step.sizes > 0)
    powers = 2 ** np.ceil(np.log2(np.maximum(step.sizes, 1))).astype(np.int64)
    return replace(step, sizes=np.where(pinned, powers, step.sizes))


def _is_tight(memory: Memory, compact: bool) -> bool:
    """Whether fragmentation decides if such a plan fits."""
    matters_from = FRAGMENTATION_MATTERS_FROM[compact] * memory.budget_bytes
    return matters_from < memory.process_bytes <= memory.budget_bytes


def reserved_bytes(sized: SizedStep, peak_bytes: int, device: DeviceBudget, warmup_bytes: int) -> int:
    """What the allocator reserves at a peak: the peak plus the fragmentation in a replay of the step.

    The peak is with cuBLAS's workspaces. Loading begins with a block of `warmup_bytes`.
    """
    first = None
    if sized.first:
        first = sized.first().rounded(device.granularity).on_device()
    replayed = replay_steps(
        sized.step,
        first=first,
        workspace_bytes=device.workspace_bytes // HANDLES,
        warmup_bytes=warmup_bytes,
        expandable=device.expandable,
    )
    return peak_bytes + replayed.reserved - replayed.requested
