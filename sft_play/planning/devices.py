"""What each process may use: the training device and its memory budget."""

import math
import os
from collections.abc import Mapping

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.machine.gpus import Machine
from sft_play.plan import Device
from sft_play.reasons import Assumed, GuardKept, MemoryLimit, PredictionErrors, Reason, UnknownCapability
from sft_play.sizing.budget import PUBLISHED_ERRORS, DeviceBudget, device_budget
from sft_play.sizing.corrections import read_overhead
from sft_play.sizing.step import ASSUMED_CAPABILITY
from sft_play.units import GIB, counted, format_bytes


def training_device(machine: Machine) -> Device:
    """What the planner needs to know about the devices; the weakest one counts."""
    if not machine.gpus:
        return Device(kind="cpu", name="the CPU", bf16=True, free_bytes=machine.ram_free_bytes)
    free = [gpu.free_bytes for gpu in machine.gpus if gpu.free_bytes is not None]
    capabilities = [gpu.compute_capability for gpu in machine.gpus if gpu.compute_capability is not None]
    return Device(
        kind="cuda",
        name=machine.gpus[0].name,
        bf16=all(bool(gpu.bf16) for gpu in machine.gpus),
        free_bytes=min(free) if free else None,
        compute_capability=min(capabilities) if capabilities else None,
    )


def smallest_total(machine: Machine) -> int | None:
    """Bytes of the smallest GPU, or of the RAM; None if unknown."""
    totals = [gpu.total_bytes for gpu in machine.gpus] or [machine.host.ram_total_bytes]
    known = [total for total in totals if total is not None]
    return min(known) if known else None


def memory_of_a_process(config: RunConfig, machine: Machine, processes: int) -> int | None:
    """Bytes that a process may use: what is free, at most parallel.memory_gib; None if unknown.

    Raises:
        ConfigError: parallel.memory_gib exceeds the memory of the device.
    """
    device, asked = training_device(machine), config.parallel.memory_gib
    free, total = device.free_bytes, smallest_total(machine)
    if device.kind == "cpu":  # processes share the RAM
        free, total = (None if size is None else size // processes for size in (free, total))
    if asked == "auto":
        return free
    if total is not None and asked * GIB > total:
        has = (
            f"{device.name} has"
            if device.kind == "cuda"
            else f"the RAM has for each of {counted(processes, 'process')}"
        )
        raise ConfigError(
            f"parallel.memory_gib={asked:g}: {has} {format_bytes(total)}, of which {format_bytes(free or 0)} "
            f"are free; allowed: up to {math.floor(100 * total / GIB) / 100:g}, or auto to use what is free"
        )
    return int(asked * GIB) if free is None else min(free, int(asked * GIB))


def memory_device(config: RunConfig, machine: Machine, processes: int) -> DeviceBudget | None:
    """The budget of each process; None if the free memory is unknown."""
    usable = memory_of_a_process(config, machine, processes)
    if usable is None:
        return None
    if not machine.gpus:
        return device_budget("cpu", usable)
    device = training_device(machine)
    return device_budget(
        "cuda",
        usable,
        world_size=processes,
        compute_capability=device.compute_capability,
        context_bytes=read_overhead(device.name, processes),
        expandable=has_expandable_segments(os.environ),
        quantized=config.tuning.mode == "qlora",
    )


def has_expandable_segments(environment: Mapping[str, str]) -> bool:
    """Whether the allocator of a process will have them: as `cli.py` sets it, unless the user did."""
    settings = (environment.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    own = [setting for setting in settings if setting is not None]
    return not own or any("expandable_segments:true" in setting.lower() for setting in own)


def memory_reasons(config: RunConfig, machine: Machine, processes: int, budget: DeviceBudget) -> list[Reason]:
    """Where the budget comes from."""
    found: list[Reason] = []
    asked = config.parallel.memory_gib
    if asked != "auto":
        usable = memory_of_a_process(config, machine, processes) or 0
        found.append(MemoryLimit(asked, usable if usable < int(asked * GIB) else None))
    found.append(GuardKept(budget.guard.bytes, budget.guard.why))
    if budget.assumed:
        found.append(Assumed(tuple(budget.assumed)))
    if machine.gpus:
        found.append(_errors(training_device(machine).compute_capability, config.tuning.mode == "qlora"))
    return found


def _errors(capability: tuple[int, int] | None, quantized: bool) -> Reason:
    """What is known of the errors of predictions on such a GPU."""
    if capability is None:
        return UnknownCapability(ASSUMED_CAPABILITY)
    runs, errors = PUBLISHED_ERRORS.get((capability, quantized), (0, {}))
    return PredictionErrors(capability, quantized, runs, tuple(errors.items()))
