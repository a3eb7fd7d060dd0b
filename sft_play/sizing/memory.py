"""From recorded steps to the memory of a run: other micro-batches, what engines add, what fits. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sft_play.sizing.allocator import Replay, replay
from sft_play.sizing.guard import Guard, guard
from sft_play.sizing.planner import Memory
from sft_play.sizing.timeline import Peak, Step, StepTrace
from sft_play.units import MIB

GAPS_MATTER = 0.8  # of the budget: gaps between blocks took less than the rest in every step that was replayed
CUDA_GRANULARITY = 512  # PyTorch's allocator rounds each block up to this
DDP_BROADCAST = 250 * MIB  # DDP sends the weights of rank 0 to the others in pieces of this size


@dataclass(frozen=True)
class Growth:
    """A step as a function of the rows of its micro-batch, exact between and beyond two recordings that did the same things.

    Each block's size is a line in the rows; a phase's peak is the largest of many sums of such lines, so that it bends where
    another moment of the phase takes over.
    """

    base: StepTrace
    base_rows: int
    bytes_per_row: np.ndarray

    @classmethod
    def between(cls, rows: Sequence[int], traces: Sequence[StepTrace]) -> "Growth | None":
        """From two recordings; None if they differ in more than sizes."""
        (first, second), (a, b) = rows, traces
        if not a.same_structure(b):
            return None
        return cls(a, first, (b.sizes - a.sizes) / (second - first))

    def at(self, rows: int) -> Step:
        """The step at this micro-batch."""
        sizes = self.base.sizes + np.rint(self.bytes_per_row * (rows - self.base_rows)).astype(np.int64)
        return Step(self.base.step.timeline, np.maximum(sizes, 0))


@dataclass(frozen=True, kw_only=True)
class DeviceBudget:
    """What a process has beside its tensors. `assumed` names the numbers that were not measured on this machine."""

    kind: str = "cuda"
    budget_bytes: int = 0  # what tensors may use: free memory without context, communicator and guard
    workspace_bytes: int = 0  # cuBLAS, inside the allocator
    context_bytes: int = 0
    communicator_bytes: int = 0
    guard: Guard = Guard(0, "")
    assumed: tuple[str, ...] = ()

    @property
    def granularity(self) -> int:
        """What block sizes are rounded up to."""
        return CUDA_GRANULARITY if self.kind == "cuda" else 1


# After CublasHandlePool.cpp; one workspace for the thread of the forward and one for that of the backward.
HOPPER_WORKSPACE, OTHER_WORKSPACE, HANDLES = 32 * MIB, 8 * MIB + 128 * 1024, 2

# No figures exist for each GPU. Context: 287 MB with lazy loading (pytorch #86509), 426 MiB (unsloth-zoo #1053).
# Communicator: 544 and 688 MB on A100 (nccl #964), 1.06 GB on 8 H100 (nccl #1685).
ASSUMED_CONTEXT, ASSUMED_COMMUNICATOR = 500 * MIB, 700 * MIB


def device_budget(
    kind: str,
    free_bytes: int,
    *,
    world_size: int = 1,
    compute_capability: tuple[int, int] | None = None,
    context_bytes: int | None = None,
    communicator_bytes: int | None = None,
) -> DeviceBudget:
    """The budget of a process on a device.

    Args:
        kind: cuda or cpu.
        free_bytes: before the process starts; the smallest over all ranks.
        world_size: processes; more than one need a communicator.
        compute_capability: of the GPU, for the size of cuBLAS workspaces.
        context_bytes: as measured; None for the assumption.
        communicator_bytes: as measured; None for the assumption.
    """
    kept = guard(kind, free_bytes)
    if kind == "cpu":
        return DeviceBudget(kind=kind, budget_bytes=free_bytes - kept.bytes, guard=kept)
    assumed = [name for name, value in (("context", context_bytes), ("communicator", communicator_bytes)) if value is None]
    context = ASSUMED_CONTEXT if context_bytes is None else context_bytes
    communicator = ASSUMED_COMMUNICATOR if communicator_bytes is None else communicator_bytes
    communicator = communicator if world_size > 1 else 0
    hopper = compute_capability is not None and compute_capability[0] == 9
    return DeviceBudget(
        kind=kind,
        budget_bytes=free_bytes - kept.bytes - context - communicator,
        workspace_bytes=HANDLES * (HOPPER_WORKSPACE if hopper else OTHER_WORKSPACE),
        context_bytes=context,
        communicator_bytes=communicator,
        guard=kept,
        assumed=tuple(name for name in assumed if name == "context" or world_size > 1),
    )


@dataclass(frozen=True, kw_only=True)
class ZeroBuckets:
    """ZeRO-2's communication settings."""

    elements: int = 500_000_000  # DeepSpeed's default
    overlap: bool = True

    def bytes(self, trained_parameters: int, element_bytes: int) -> int:
        """Buffers that gradients are collected in during the backward pass; overlapping needs a second one.

        What fits into one bucket is exchanged at its end, with nothing left to overlap: launch/deepspeed.py switches it off.
        """
        overlaps = self.overlap and self.elements < trained_parameters
        return (2 if overlaps else 1) * element_bytes * min(self.elements, trained_parameters)


@dataclass(frozen=True, kw_only=True)
class Engine:
    """How processes share the work."""

    name: str = "none"  # "none", "ddp" or "deepspeed_z2"
    world_size: int = 1
    accumulates: bool = False
    buckets: ZeroBuckets = ZeroBuckets()


def _with(peak: Peak, **changes: int) -> Peak:
    """The peak with bytes added to terms."""
    terms = dict(peak.terms)
    for name, size in changes.items():
        terms[name] = terms.get(name, 0) + size
    return Peak(peak.bytes + sum(changes.values()), terms)


def with_engine(peaks: dict[str, Peak], engine: Engine, trained_parameters: int, element_bytes: int) -> dict[str, Peak]:
    """The phases of one of several processes.

    Args:
        peaks: of one process alone, recorded with gradients alive from the start (`StepSpec.accumulates`).
        engine: how the processes share the work.
        trained_parameters: elements that are trained.
        element_bytes: of a trained parameter and its gradient.
    """
    gradients = trained_parameters * element_bytes
    if engine.name == "ddp":
        # Gradients are views into buckets, which exist from the first step to the last (gradient_as_bucket_view).
        load = _with(peaks["load"], engine=min(DDP_BROADCAST, peaks["load"].bytes))
        evaluation = _with(peaks["evaluation"], engine=gradients)
        return {**peaks, "load": load, "evaluation": evaluation}
    if engine.name == "deepspeed_z2":
        return _with_zero2(peaks, engine, trained_parameters, element_bytes)
    return peaks


def _with_zero2(peaks: dict[str, Peak], engine: Engine, trained: int, element_bytes: int) -> dict[str, Peak]:
    """ZeRO stage 2 after DeepSpeed's stage_1_and_2.py: each process keeps fp32 weights and states of its share alone."""
    share = -(-trained // engine.world_size)
    states, own_gradients = 12 * share, element_bytes * share  # master weights and two moments, 4 bytes each
    kept_between = own_gradients if engine.accumulates else 0
    buckets = engine.buckets.bytes(trained, element_bytes)
    extra = {
        "load": dict(optimizer=states, engine=element_bytes * trained),  # parameters are copied into one flat buffer
        "forward": dict(optimizer=states, gradients=kept_between),
        # reduced gradients of the own share are kept, and before the step copied into one flat buffer
        "backward": dict(optimizer=states, gradients=kept_between + own_gradients, engine=buckets),
        "optimizer": dict(optimizer=states, gradients=own_gradients, engine=own_gradients + 4 * share),
        "evaluation": dict(optimizer=states),
    }
    shared = {}
    for phase, peak in peaks.items():
        alone = {name: -peak.terms[name] for name in ("optimizer", "gradients")}
        shared[phase] = _with(_with(peak, **alone), **extra[phase])
    return shared


def between_steps(forward: Peak, *, keeps_gradients: bool) -> Peak:
    """What is there while a checkpoint is saved, tensor by tensor through main memory: weights and optimizer states.

    Args:
        forward: the phase that finds them as well.
        keeps_gradients: whether gradients live in buffers that stay (DDP).
    """
    kept = ("weights", "adapters", "optimizer", *(["gradients"] if keeps_gradients else []))
    terms = {name: size if name in kept else 0 for name, size in forward.terms.items()}
    return Peak(sum(terms.values()), terms)


def trained_bytes(peaks: dict[str, Peak]) -> int:
    """Bytes of all gradients, from a step that was recorded with them alive."""
    return peaks["forward"].terms["gradients"]


def estimate(step: Step, device: DeviceBudget, engine: Engine | None = None, *, element_bytes: int = 4) -> Memory:
    """The memory of one process: the highest phase counts, never a sum of phases.

    Args:
        step: as recorded or fitted.
        device: what else the process holds, and what it may use.
        engine: how processes share the work; default one process.
        element_bytes: of a trained parameter.
    """
    peaks = step.peaks(device.granularity)
    if engine is not None:
        peaks = with_engine(peaks, engine, trained_bytes(peaks) // element_bytes, element_bytes)
    peaks["save"] = between_steps(peaks["forward"], keeps_gradients=engine is not None and engine.name == "ddp")
    peaks = {phase: peak if phase == "load" else _with(peak, engine=device.workspace_bytes) for phase, peak in peaks.items()}
    top = max(peaks, key=lambda phase: peaks[phase].bytes)
    tight = device.kind == "cuda" and GAPS_MATTER * device.budget_bytes < peaks[top].bytes <= device.budget_bytes
    return Memory(
        budget_bytes=device.budget_bytes,
        peak_bytes=peaks[top].bytes,
        peak_phase=top,
        phases={phase: peak.bytes for phase, peak in peaks.items()},
        terms={**peaks[top].terms, "context": device.context_bytes + device.communicator_bytes},
        reserved_bytes=reserved_bytes(step, peaks[top].bytes) if tight else None,
        guard_bytes=device.guard.bytes,
    )


def reserved_bytes(step: Step, peak_bytes: int) -> int:
    """What the caching allocator takes from the device for a peak: the gaps of the replayed step come on top."""
    gaps = replay_step(step)
    return peak_bytes + gaps.reserved - gaps.allocated


def replay_step(step: Step, *, expandable: bool = True) -> Replay:
    """What PyTorch's caching allocator reserves for two such steps: from the second on it finds what the first one left.

    Args:
        step: from the first weight to the evaluation.
        expandable: as in `sft_play.sizing.allocator.replay`.
    """
    sizes = step.sizes[step.timeline.source].tolist()
    events = [event for event in step.timeline.events.tolist() if sizes[abs(event) - 1]]
    passing = {-event for event in events if event < 0}
    again = [event for event in events if abs(event) in passing]
    return replay(((abs(event), sizes[event - 1] if event > 0 else 0) for event in events + again), expandable=expandable)
