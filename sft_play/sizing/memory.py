"""Derives the memory of a run from traced steps: other micro-batch sizes, the budget, fragmentation. Pure."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sft_play.engines.base import Division, Engine
from sft_play.engines.registry import ALONE
from sft_play.plan import HostMemory, Memory
from sft_play.sizing.allocator import replay_steps
from sft_play.sizing.budget import HANDLES, DeviceBudget
from sft_play.timeline import TERMS, Peak, Step, StepTrace
from sft_play.work import directions

# Below this share of the budget, fragmentation cannot matter: in no replayed step with expandable segments
# and one stream did it need the other 20%. Fixed ones need more, up to a third in published runs
# (benchmarks/evidence), and so do steps of divided models, which allocate on several streams.
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


def estimate(
    steps: Sequence[Step],
    device: DeviceBudget,
    engine: Engine = ALONE,
    division: Division | None = None,
    *,
    firsts: Sequence[bool] = (),
    complete: bool = False,
) -> Memory:
    """The memory of one process: the highest phase counts, never a sum of phases.

    Each phase counts in the step in which its peak is highest. The engine transforms the steps of a single
    process according to its division; `firsts` says which are the first micro-batches of their optimizer
    steps, so that no earlier one has left gradients. With `complete`, reserved bytes are predicted, which
    takes time, also where they cannot decide.
    """
    host = host_memory(steps, device, engine, division)
    steps = [step.rounded(device.granularity) for step in steps]
    if division:
        division = replace(division, room_bytes=device.budget_bytes - device.context_bytes)
        alone = replace(division, accumulates=False, precedes=division.accumulates)
        divisions = [alone if first else division for first in firsts] or [division] * len(steps)
        steps = list(map(engine.transform, steps, divisions))
    steps = [step.on_device() for step in steps]
    peaks: dict[str, Peak] = {}
    step_of: dict[str, Step] = {}
    for step in steps:
        for phase, peak in step.peaks().items():
            if phase not in peaks or peak.bytes > peaks[phase].bytes:
                peaks[phase], step_of[phase] = peak, step
    saved = engine.saved_from_memory(peaks["forward"].terms)
    peaks["save"] = Peak(sum(saved.values()), saved)
    for phase, peak in peaks.items():
        if phase != "load":
            terms = peak.terms | {"engine": peak.terms.get("engine", 0) + device.workspace_bytes}
            peaks[phase] = Peak(peak.bytes + device.workspace_bytes, terms)
    top = max(peaks, key=lambda phase: peaks[phase].bytes)
    memory = Memory(
        budget_bytes=device.budget_bytes,
        peak_bytes=peaks[top].bytes,
        peak_phase=top,
        phases={phase: peak.bytes for phase, peak in peaks.items()},
        terms={**peaks[top].terms, "context": device.context_bytes},
        phase_terms={phase: peak.terms for phase, peak in peaks.items()},
        guard_bytes=device.guard.bytes,
        host=host,
    )
    compact = device.expandable and not any(step.timeline.streams.any() for step in steps)
    if device.kind == "cpu" or not (complete or _is_tight(memory, compact)):
        return memory
    # transformers' caching_allocator_warmup begins with a block of about the size of the weights
    step = step_of.get(top, steps[0])
    warmup = 0 if engine.shards_weights else step.peaks()["load"].terms["weights"]
    return replace(memory, reserved_bytes=reserved_bytes(step, memory.peak_bytes, device, warmup))


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


def reserved_bytes(step: Step, peak_bytes: int, device: DeviceBudget, warmup_bytes: int) -> int:
    """What the allocator reserves at a peak: the peak plus the fragmentation in a replay of the step.

    The peak is with cuBLAS's workspaces. Loading begins with a block of `warmup_bytes`.
    """
    replayed = replay_steps(
        step,
        workspace_bytes=device.workspace_bytes // HANDLES,
        warmup_bytes=warmup_bytes,
        expandable=device.expandable,
    )
    return peak_bytes + replayed.reserved - replayed.requested
