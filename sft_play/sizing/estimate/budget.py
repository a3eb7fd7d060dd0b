"""What a process may use of its device: free memory less a guard, and its fixed costs besides tensors. Pure.

The guard is memory that no plan may use, derived from the measured errors of the prediction. These come from
benchmarks/results; tests/unit/sizing/test_benchmark_results.py compares the figures below with them.
"""

from dataclasses import dataclass
from typing import NamedTuple

from sft_play.units import GIB, MIB, counted, format_bytes

SAFETY = 2  # times the worst measured under-prediction: a benchmark grid does not contain the worst case
LEAST_SHARE = 0.01
UNMEASURED_SHARE = 0.03  # if no benchmark has been run
LEAST_BYTES = 256 * MIB
# The worst under-prediction of reserved bytes in published runs with NF4 weights and fixed segments, a share
# of what was measured, hence of the free memory: benchmarks/results/evidence.json
LOOSE_SHARE = 0.127
CUDA_GRANULARITY = 512  # PyTorch's allocator rounds each block up to a multiple of this

# After CublasHandlePool.cpp; one workspace for the forward thread and one for the backward thread.
HOPPER_WORKSPACE, OTHER_WORKSPACE, HANDLES = 32 * MIB, 8 * MIB + 128 * 1024, 2

# Before a probe has measured it. Context: 141 MiB on a Tesla T4, the same in all runs of four series
# (benchmarks/evidence), 751 to 753 MiB on an H200 with driver 580 and CUDA 13 (benchmarks/results/gpu);
# elsewhere 287 MB with lazy loading (pytorch #86509), 426 MiB (unsloth-zoo #1053).
# Communicator: 544 and 688 MB on A100 (nccl #964), 1.06 GB on 8 H100 (nccl #1685).
CONTEXTS = {(7, 5): 141 * MIB, (9, 0): 753 * MIB}
ASSUMED_CONTEXT, ASSUMED_COMMUNICATOR = 500 * MIB, 700 * MIB
# RAM of a process on a GPU besides tensors: 412 MiB were measured on a CPU, and CUDA's share is a guess.
ASSUMED_RAM = 3 * GIB
COMPILER_RAM = 512 * MIB  # g++ on a layer's code took 468 MiB; Triton's processes were not measured


class MeasuredError(NamedTuple):
    """The worst under-prediction in a benchmark, relative to the prediction."""

    worst: float
    where: str


# Of a CPU: allocated bytes, benchmarks/results/sizing_cpu.json
CPU_ERROR = MeasuredError(0.0141, "288 steps of small models on a CPU, the worst of them in bf16")
# Of one process on a GPU, by compute capability: reserved bytes, benchmarks/results/gpu
GPU_ERRORS = {(9, 0): MeasuredError(0.0006, "7 steps on an H200")}
# By compute capability, and whether weights are quantized while they are loaded (NF4): the number of
# published runs with fixed segments, and the lowest and highest relative error of what they measured;
# negative if the prediction was too low. From benchmarks/results/evidence.json, compared by
# tests/unit/benchmarks/test_evidence.py
PUBLISHED_ERRORS: dict[tuple[tuple[int, int], bool], tuple[int, dict[str, tuple[float, float]]]] = {
    ((7, 5), False): (
        20,
        {"allocated": (-0.0004, 0.0), "reserved": (-0.0003, 0.0028), "process": (-0.0002, 0.0027)},
    ),
    ((7, 5), True): (
        51,
        {"allocated": (-0.0035, 0.0034), "reserved": (-0.1262, 0.1527), "process": (-0.1229, 0.1484)},
    ),
    ((8, 9), False): (1, {"allocated": (-0.0004, -0.0004), "reserved": (-0.0298, -0.0298)}),
    ((8, 9), True): (10, {"allocated": (-0.0002, 0.0001), "reserved": (0.0, 0.0552)}),
}


@dataclass(frozen=True)
class Guard:
    """Bytes that stay free, and the reason for the user."""

    bytes: int
    why: str


def guard(
    kind: str, free_bytes: int, *, loose: bool = False, measured_on: tuple[int, int] | None = None
) -> Guard:
    """The part of the free memory that a plan must not use.

    Args:
        kind: "cuda" or "cpu".
        free_bytes: free memory before the process starts.
        loose: whether reserved bytes are known less well: 4-bit weights in segments of fixed size, where
            holes that loading leaves can only be filled by what fits.
        measured_on: the compute capability whose `GPU_ERRORS` count, if there are any; None for no such.
    """
    share, why = _cpu_share() if kind == "cpu" else _gpu_share(measured_on)
    if loose and share < LOOSE_SHARE:
        share = LOOSE_SHARE
        why = f"{share:.1%}, the most by which published 4-bit runs with fixed segments exceeded predictions"
    if share * free_bytes < LEAST_BYTES:
        return Guard(LEAST_BYTES, f"the minimum; on a larger device {why}")
    return Guard(int(share * free_bytes), why)


def _cpu_share() -> tuple[float, str]:
    share = max(UNMEASURED_SHARE, SAFETY * CPU_ERROR.worst)
    why = f"{share:.1%} for memory that Python and its libraries use outside of PyTorch"
    return share, f"{why}; under-predictions were at most {CPU_ERROR.worst:.2%} in {CPU_ERROR.where}"


def _gpu_share(measured_on: tuple[int, int] | None) -> tuple[float, str]:
    measured = GPU_ERRORS.get(measured_on) if measured_on else None
    if measured is None:
        why = "since prediction errors of such runs have not been measured on such a GPU"
        return UNMEASURED_SHARE, f"a conservative {UNMEASURED_SHARE:.0%}, {why}"
    share = max(LEAST_SHARE, SAFETY * measured.worst)
    return share, f"{share:.1%}, from under-predictions of at most {measured.worst:.2%} in {measured.where}"


@dataclass(frozen=True)
class HostBudget:
    """The RAM of a machine for processes that offload to it, and their fixed costs besides tensors."""

    budget_bytes: int | None  # for all of them: free memory minus the guard; None if unknown
    processes: int
    own_bytes: int = ASSUMED_RAM  # of each


@dataclass(frozen=True, kw_only=True)
class DeviceBudget:
    """What a process may use, and its fixed costs besides tensors."""

    kind: str = "cuda"
    budget_bytes: int = 0  # for the process: free memory minus the guard
    workspace_bytes: int = 0  # of cuBLAS, inside the allocator
    context_bytes: int = 0  # outside the allocator, with the communicator
    guard: Guard = Guard(0, "")
    expandable: bool = True  # segments of PyTorch's allocator
    assumed: tuple[str, ...] = ()  # names of the costs that were not measured on this machine
    host: HostBudget = HostBudget(None, 1)  # of a GPU's machine
    threads: int = 1  # of a process on a CPU

    @property
    def granularity(self) -> int:
        """Block sizes are rounded up to a multiple of this."""
        return CUDA_GRANULARITY if self.kind == "cuda" else 1


def host_budget(free_bytes: int | None, processes: int, compilers: int = 0) -> HostBudget:
    """The second budget of so many processes, each with `compilers`, of a machine with this much free RAM."""
    own = ASSUMED_RAM + compilers * COMPILER_RAM
    return HostBudget(free_bytes and free_bytes - guard("cpu", free_bytes).bytes, processes, own)


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
    expandable: bool = True,
    quantized: bool = False,
    host: HostBudget = HostBudget(None, 1),
    threads: int = 1,
    compilers: int = 0,
) -> DeviceBudget:
    """The budget of a process on a device, "cuda" or "cpu".

    Args:
        kind: of the device.
        free_bytes: free memory before the process starts; the minimum over all ranks.
        world_size: number of processes; more than one need a communicator.
        compute_capability: of the GPU, for the size of cuBLAS workspaces.
        context_bytes: measured size, with that of the communicator; None to assume both.
        expandable: whether PyTorch's allocator has expandable segments.
        quantized: whether weights become 4-bit while they are loaded.
        host: the RAM of the GPU's machine.
        threads: of the process, on a CPU.
        compilers: its processes that compile layers, on a CPU.
    """
    alone = compute_capability if world_size == 1 and expandable else None  # all that was measured
    kept_free = guard(kind, free_bytes, loose=quantized and not expandable, measured_on=alone)
    if kind == "cpu":
        if size := compilers * COMPILER_RAM:
            why = f"{kept_free.why}; with {format_bytes(size)} for {counted(compilers, 'compiler')}"
            kept_free = Guard(kept_free.bytes + size, why)
        usable = free_bytes - kept_free.bytes
        return DeviceBudget(kind=kind, budget_bytes=usable, guard=kept_free, threads=threads)
    assumed: tuple[str, ...] = ()
    if context_bytes is None:
        context_bytes = CONTEXTS.get(compute_capability or (0, 0), ASSUMED_CONTEXT)
        assumed = ("context",)
        if world_size > 1:
            context_bytes += ASSUMED_COMMUNICATOR
            assumed = ("context", "communicator")
    return DeviceBudget(
        kind=kind,
        budget_bytes=free_bytes - kept_free.bytes,
        workspace_bytes=HANDLES * cublas_workspace(compute_capability),
        context_bytes=context_bytes,
        guard=kept_free,
        expandable=expandable,
        assumed=assumed,
        host=host,
    )
