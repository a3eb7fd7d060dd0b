"""Derives the memory of a run from traced steps: other micro-batch sizes, the budget, fragmentation. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sft_play.engines.base import Division, Engine
from sft_play.engines.registry import ALONE
from sft_play.plan import Memory
from sft_play.sizing.allocator import replay_steps
from sft_play.sizing.guard import Guard, guard
from sft_play.timeline import Peak, Step, StepTrace
from sft_play.units import MIB
from sft_play.work import directions

# Below this share of the budget, fragmentation cannot matter: in no replayed step with expandable segments
# did it need the other 20%. Fixed ones need more, up to a third in published runs (benchmarks/evidence).
FRAGMENTATION_MATTERS_FROM = {True: 0.8, False: 0.5}  # by whether segments are expandable
CUDA_GRANULARITY = 512  # PyTorch's allocator rounds each block up to a multiple of this


Counts = tuple[int, int]  # rows, and supervised tokens


@dataclass(frozen=True)
class StepScaling:
    """A step as a function of its micro-batch, from traces with the same structure.

    The size of each block is linear in the rows and in the supervised tokens, so two traces give the steps
    with the same supervised share, and three those with any share. Blocks allocated in the evaluation depend
    on the evaluation batch instead, which may be of another size. A phase's peak is the maximum over many
    sums of block sizes, hence not linear: it has a kink where another moment of the phase becomes the
    highest.
    """

    base: StepTrace
    at_base: Counts
    slopes: np.ndarray  # [blocks, 2]: bytes per row and per supervised token
    in_evaluation: np.ndarray  # [blocks]: whether a block is allocated in the evaluation

    @classmethod
    def fit(cls, counts: Sequence[Counts], traces: Sequence[StepTrace]) -> "StepScaling | None":
        """Fits two or three traces; None if they differ in more than sizes."""
        base, *others = traces
        if not all(base.same_structure(other) for other in others):
            return None
        growth = np.stack([other.sizes - base.sizes for other in others], axis=-1)
        return cls(base, counts[0], growth @ directions(counts), base.born_in("evaluation"))

    def at(self, counts: Counts, evaluated: Counts | None = None) -> Step:
        """The step of a micro-batch, and of an evaluation batch (default: of the same size)."""
        change, change_in_evaluation = (
            np.rint(self.slopes @ np.subtract(each, self.at_base)) for each in (counts, evaluated or counts)
        )
        growth = np.where(self.in_evaluation, change_in_evaluation, change)
        return Step(self.base.step.timeline, np.maximum(self.base.sizes + growth.astype(np.int64), 0))


@dataclass(frozen=True, kw_only=True)
class DeviceBudget:
    """What a process may use, and its fixed costs besides tensors."""

    kind: str = "cuda"
    budget_bytes: int = 0  # for the process: free memory minus the guard
    workspace_bytes: int = 0  # of cuBLAS, inside the allocator
    context_bytes: int = 0
    communicator_bytes: int = 0
    guard: Guard = Guard(0, "")
    expandable: bool = True  # segments of PyTorch's allocator
    assumed: tuple[str, ...] = ()  # names of the costs that were not measured on this machine

    @property
    def granularity(self) -> int:
        """Block sizes are rounded up to a multiple of this."""
        return CUDA_GRANULARITY if self.kind == "cuda" else 1


# After CublasHandlePool.cpp; one workspace for the forward thread and one for the backward thread.
HOPPER_WORKSPACE, OTHER_WORKSPACE, HANDLES = 32 * MIB, 8 * MIB + 128 * 1024, 2

# Not every GPU has published figures. Context: 141 MiB on a Tesla T4, the same in all runs of four series
# (benchmarks/evidence); elsewhere 287 MB with lazy loading (pytorch #86509), 426 MiB (unsloth-zoo #1053).
# Communicator: 544 and 688 MB on A100 (nccl #964), 1.06 GB on 8 H100 (nccl #1685).
CONTEXTS = {(7, 5): 141 * MIB}
ASSUMED_CONTEXT, ASSUMED_COMMUNICATOR = 500 * MIB, 700 * MIB


def cublas_workspace(compute_capability: tuple[int, int] | None) -> int:
    """Bytes of one workspace of cuBLAS: larger on Hopper and on every Blackwell GPU, also of the RTX 50."""
    since_hopper = compute_capability is not None and compute_capability >= (9, 0)
    return HOPPER_WORKSPACE if since_hopper else OTHER_WORKSPACE


def device_budget(
    kind: str,
    free_bytes: int,
    *,
    world_size: int = 1,
    compute_capability: tuple[int, int] | None = None,
    context_bytes: int | None = None,
    communicator_bytes: int | None = None,
    expandable: bool = True,
    quantized: bool = False,
) -> DeviceBudget:
    """The budget of a process on a device.

    Args:
        kind: "cuda" or "cpu".
        free_bytes: free memory before the process starts; the minimum over all ranks.
        world_size: number of processes; more than one need a communicator.
        compute_capability: of the GPU, for the size of cuBLAS workspaces.
        context_bytes: measured size; None to assume one.
        communicator_bytes: measured size; None to assume one.
        expandable: whether PyTorch's allocator has expandable segments.
        quantized: whether weights become 4-bit while they are loaded.
    """
    kept_free = guard(kind, free_bytes, loose=quantized and not expandable)
    if kind == "cpu":
        return DeviceBudget(kind=kind, budget_bytes=free_bytes - kept_free.bytes, guard=kept_free)
    assumed = []
    if context_bytes is None:
        context_bytes = CONTEXTS.get(compute_capability or (0, 0), ASSUMED_CONTEXT)
        assumed.append("context")
    if world_size == 1:
        communicator_bytes = 0
    elif communicator_bytes is None:
        communicator_bytes = ASSUMED_COMMUNICATOR
        assumed.append("communicator")
    return DeviceBudget(
        kind=kind,
        budget_bytes=free_bytes - kept_free.bytes,
        workspace_bytes=HANDLES * cublas_workspace(compute_capability),
        context_bytes=context_bytes,
        communicator_bytes=communicator_bytes,
        guard=kept_free,
        expandable=expandable,
        assumed=tuple(assumed),
    )


def _with(peak: Peak, **changes: int) -> Peak:
    """The peak with `changes` (term -> bytes) added."""
    terms = dict(peak.terms)
    for name, size in changes.items():
        terms[name] = terms.get(name, 0) + size
    return Peak(peak.bytes + sum(changes.values()), terms)


def estimate(
    step: Step,
    device: DeviceBudget,
    engine: Engine = ALONE,
    division: Division | None = None,
    *,
    complete: bool = False,
) -> Memory:
    """The memory of one process: the highest phase counts, never a sum of phases.

    Args:
        step: of a single process, traced or derived.
        device: the budget and the fixed costs of the process.
        engine: of the run, which transforms the step.
        division: of the step among several processes.
        complete: whether to predict reserved bytes, which takes time, also where they cannot decide.
    """
    step = step.rounded(device.granularity)
    step = engine.transform(step, division) if division else step
    peaks = step.peaks()
    saved = engine.saved_from_memory(peaks["forward"].terms)
    peaks["save"] = Peak(sum(saved.values()), saved)
    for phase in peaks:
        if phase != "load":
            peaks[phase] = _with(peaks[phase], engine=device.workspace_bytes)
    top = max(peaks, key=lambda phase: peaks[phase].bytes)
    memory = Memory(
        budget_bytes=device.budget_bytes,
        peak_bytes=peaks[top].bytes,
        peak_phase=top,
        phases={phase: peak.bytes for phase, peak in peaks.items()},
        terms={**peaks[top].terms, "context": device.context_bytes + device.communicator_bytes},
        phase_terms={phase: peak.terms for phase, peak in peaks.items()},
        guard_bytes=device.guard.bytes,
    )
    if device.kind == "cpu" or not (complete or _is_tight(memory, device)):
        return memory
    return replace(memory, reserved_bytes=reserved_bytes(step, memory.peak_bytes, device))


def _is_tight(memory: Memory, device: DeviceBudget) -> bool:
    """Whether fragmentation decides if such a plan fits."""
    matters_from = FRAGMENTATION_MATTERS_FROM[device.expandable] * device.budget_bytes
    return matters_from < memory.process_bytes <= device.budget_bytes


def reserved_bytes(step: Step, peak_bytes: int, device: DeviceBudget) -> int:
    """What the allocator reserves at a peak: the peak plus the fragmentation in a replay of the step.

    Loading begins with a block of about the size of the weights (transformers' caching_allocator_warmup).

    Args:
        step: of this process.
        peak_bytes: its predicted peak, with cuBLAS's workspaces.
        device: the fixed costs of the process, and how its allocator works.
    """
    weights = step.peaks()["load"].terms["weights"]
    replayed = replay_steps(
        step,
        workspace_bytes=device.workspace_bytes // HANDLES,
        warmup_bytes=weights,
        expandable=device.expandable,
    )
    return peak_bytes + replayed.reserved - replayed.requested
