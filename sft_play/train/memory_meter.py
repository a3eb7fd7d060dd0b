"""Measures the device memory of training, and puts it beside the prediction."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from sft_play.machine.gpus import detect
from sft_play.plan import Plan
from sft_play.sizing.estimate.corrections import ProbeResult
from sft_play.train.metered_steps import MeteredSteps
from sft_play.train.ranks import from_all

KINDS = ("peak", "reserved", "process")  # allocated, reserved, and as the driver counts it
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class MemoryMeter:
    """Peak memory since the meter was started.

    On a GPU, what the allocator held; on a CPU, how far resident memory rose. There, memory of interpreter
    and libraries that was resident before is not counted; pages that they touch later are.
    """

    device: str
    resident_before: int = 0

    @classmethod
    def start(cls, device: str) -> "MemoryMeter":
        """Resets the peak and starts measuring."""
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            return cls(device)
        if CLEAR_REFS.exists():
            CLEAR_REFS.write_text("5")  # resets the peak (proc(5)); without it an earlier peak counts
        return cls(device, _status_bytes("VmRSS"))

    def peak_bytes(self) -> int:
        """The peak since the start."""
        if self.device == "cuda":
            return torch.cuda.max_memory_allocated()
        return max(0, _status_bytes("VmHWM") - self.resident_before)

    def reserved_bytes(self) -> int | None:
        """The most that the GPU's allocator reserved since the start; None on a CPU."""
        return torch.cuda.max_memory_reserved() if self.device == "cuda" else None


def overhead_bytes(device: torch.device) -> int | None:
    """GPU memory of this process outside PyTorch's allocator; None on a CPU, or if the driver is silent."""
    if device.type != "cuda":
        return None
    used = [gpu.own_bytes for gpu in detect().gpus if gpu.own_bytes]
    return used[0] - torch.cuda.memory_reserved(device) if used else None


def _status_bytes(name: str) -> int:
    """A size of this process from /proc; 0 if there is none (not Linux)."""
    match = re.search(rf"^{name}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE) if STATUS.exists() else None
    return int(match[1]) * 1024 if match else 0


def predicted_memory(plan: Plan) -> dict[str, int | str | None]:
    """What summary.json says about the plan's memory, in bytes, and its origin; None where there is none."""
    tree = plan.memory.to_json() if plan.memory else {}
    found = _entries("predicted", *(tree.get(f"{name}_bytes") for name in KINDS))
    return {**found, "predicted_memory_origin": tree.get("origin")}


def of_run(meter: MemoryMeter, device: torch.device, metered: MeteredSteps | None) -> ProbeResult:
    """What a run took at most, on any rank: on a GPU all of it, on a CPU the tensors of the metered steps.

    All ranks must call it.
    """
    if device.type == "cpu":
        return ProbeResult.of_all(from_all(ProbeResult(phases=metered.phases if metered else {})))
    of_rank = ProbeResult(
        phases={"run": meter.peak_bytes()},
        reserved_bytes=meter.reserved_bytes(),
        overhead_bytes=overhead_bytes(device),
    )
    return ProbeResult.of_all(from_all(of_rank))


def measured_memory(
    run: ProbeResult, device: torch.device, probed: ProbeResult | None, metered: MeteredSteps | None
) -> dict[str, int | str | None]:
    """What summary.json says about measured memory, in bytes, and of what it is; None if not measured.

    On a GPU, whose peaks the probe has reset, the higher of probe and run counts. On a CPU the probe counts
    if the steps that were to be metered had been run before.
    """
    probe = probed or ProbeResult()
    if device.type == "cpu":
        origin = "probe" if probe.phases else None
        if metered and run.phases:
            origin = metered.name
        peak = run.peak_bytes if run.phases else probe.peak_bytes
        return {**_entries("measured", peak, None, None), "measured_memory_origin": origin}
    reserved = max(probe.reserved_bytes or 0, run.reserved_bytes or 0)
    process = None if run.overhead_bytes is None else reserved + run.overhead_bytes
    sizes = max(probe.peak_bytes or 0, run.peak_bytes or 0), reserved, process
    return {**_entries("measured", *sizes), "measured_memory_origin": "run"}


def _entries(prefix: str, *sizes: int | None) -> dict[str, int | None]:
    return {f"{prefix}_{name}_bytes": size for name, size in zip(KINDS, sizes, strict=True)}
