"""What each process may use: the training device and its memory budget."""

import math
from dataclasses import replace

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.machine.allocator import has_expandable_segments
from sft_play.machine.gpus import Machine
from sft_play.machine.host import asked_threads, compilers_of
from sft_play.plan import Device
from sft_play.reasons.evidence import memory_limit, prediction_errors
from sft_play.sizing.estimate.budget import (
    GPU_ERRORS,
    PUBLISHED_ERRORS,
    DeviceBudget,
    device_budget,
    host_budget,
)
from sft_play.sizing.estimate.corrections import read_overhead
from sft_play.sizing.step import ASSUMED_CAPABILITY
from sft_play.units import GIB, counted, format_bytes


def training_device(machine: Machine) -> Device:
    """What the planner needs to know about the devices; the weakest one counts."""
    if not machine.gpus:
        return Device(kind="cpu", name="the CPU", bf16=True, free_bytes=machine.host.ram_free_bytes)
    free = [gpu.free_bytes for gpu in machine.gpus if gpu.free_bytes is not None]
    capabilities = [gpu.compute_capability for gpu in machine.gpus if gpu.compute_capability is not None]
    return Device(
        kind="cuda",
        name=machine.gpus[0].name,
        bf16=all(bool(gpu.bf16) for gpu in machine.gpus),
        free_bytes=min(free, default=None),
        compute_capability=min(capabilities, default=None),
    )


def memory_of_a_process(config: RunConfig, machine: Machine, processes: int) -> int | None:
    """Bytes that a process may use: what is free, at most parallel.memory_gib; None if unknown.

    Raises:
        ConfigError: parallel.memory_gib exceeds the memory of the device.
    """
    device, asked = training_device(machine), config.parallel.memory_gib
    totals = [gpu.total_bytes for gpu in machine.gpus] or [machine.host.ram_total_bytes]
    free, total = device.free_bytes, min(filter(None, totals), default=None)
    if device.kind == "cpu":  # processes share the RAM
        free, total = (None if size is None else size // processes for size in (free, total))
    if asked == "auto":
        return free
    if total is not None and asked * GIB > total:
        has = f"{device.name} has"
        if device.kind == "cpu":
            has = f"the RAM has for each of {counted(processes, 'process')}"
        raise ConfigError(
            f"parallel.memory_gib={asked:g}: {has} {format_bytes(total)}, of which {format_bytes(free or 0)} "
            f"are free; allowed: up to {math.floor(100 * total / GIB) / 100:g}, or auto to use what is free"
        )
    return int(asked * GIB) if free is None else min(free, int(asked * GIB))


def training_threads(machine: Machine, processes: int) -> int | None:
    """Threads per process when training on the CPU, as the launcher sets them; None on GPUs."""
    if machine.gpus:
        return None
    return asked_threads() or max(1, (machine.host.cpu_cores or 1) // processes)


def memory_device(
    config: RunConfig, machine: Machine, processes: int, budget_bytes: int | None = None
) -> DeviceBudget | None:
    """The budget of each process, of so many bytes if they are said; None if the free memory is unknown."""
    usable = memory_of_a_process(config, machine, processes)
    if usable is None:
        return None
    compilers = config.train.asks_compile * compilers_of(machine.host.cpu_cores or 1, processes)
    if not machine.gpus:
        threads = training_threads(machine, processes) or 1
        found = device_budget("cpu", usable, threads=threads, compilers=compilers)
    else:
        device, free_ram = training_device(machine), None if machine.what_if else machine.host.ram_free_bytes
        found = device_budget(
            "cuda",
            usable,
            world_size=processes,
            compute_capability=device.compute_capability,
            context_bytes=read_overhead(device.name, machine.driver, processes),
            expandable=has_expandable_segments(),
            quantized=config.tuning.mode == "qlora",
            host=host_budget(free_ram, min(processes, len(machine.gpus)), compilers),
        )
    return found if budget_bytes is None else replace(found, budget_bytes=budget_bytes)


def memory_reasons(config: RunConfig, machine: Machine, processes: int, budget: DeviceBudget) -> list[str]:
    """Where the budget comes from."""
    found = []
    asked = config.parallel.memory_gib
    if asked != "auto":
        usable = memory_of_a_process(config, machine, processes) or 0
        found.append(memory_limit(asked, usable if usable < int(asked * GIB) else None))
    found.append(f"guard {format_bytes(budget.guard.bytes)}: {budget.guard.why}")
    if budget.assumed:
        found.append(f"assumed, not measured: {' and '.join(budget.assumed)} of each process")
    capability, quantized = training_device(machine).compute_capability, config.tuning.mode == "qlora"
    if capability is not None:
        runs, errors = PUBLISHED_ERRORS.get((capability, quantized), (0, {}))
        if runs or capability not in GPU_ERRORS:
            found.append(prediction_errors(capability, quantized, runs, errors))
    elif machine.gpus:
        found.append("compute capability unknown: kernels of {}.{} assumed".format(*ASSUMED_CAPABILITY))
    return found
