"""Console tables about a machine: GPUs, memory, and the processes that use them."""

from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from sft_play.machine.gpus import GpuProcess, Machine
from sft_play.units import format_bytes


def _or_na(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "n/a" if value is None else str(value)


def memory_text(free: int | None, total: int | None) -> str:
    """`memory_text(5 * GIB, 24 * GIB)` is "5.00 GiB free of 24.00 GiB"."""
    free_text, total_text = (format_bytes(value) if value is not None else "n/a" for value in (free, total))
    return f"{free_text} free of {total_text}"


def process_text(process: GpuProcess) -> str:
    """Process id, name and memory: "4021 python 3.10 GiB"."""
    size = format_bytes(process.used_bytes) if process.used_bytes is not None else "n/a"
    return f"{process.pid} {process.name or 'n/a'} {size}"


def gpu_info_table(machine: Machine) -> RenderableType:
    """The output of `make gpu-info`."""
    host = machine.host
    parts: list[Any] = []
    if machine.gpus:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for heading in ("", "GPU", "memory", "compute", "bf16", "fp16", "link", "processes"):
            table.add_column(heading, overflow="fold")
        for gpu in machine.gpus:
            capability = ".".join(map(str, gpu.compute_capability)) if gpu.compute_capability else "n/a"
            users = "\n".join(escape(process_text(process)) for process in gpu.processes) or "none"
            table.add_row(
                str(gpu.index),
                gpu.name + (" (MIG)" if gpu.mig else ""),
                memory_text(gpu.free_bytes, gpu.total_bytes),
                capability,
                _or_na(gpu.bf16),
                _or_na(gpu.fp16),
                _or_na(gpu.link),
                users,
            )
        parts += [table, f"driver {_or_na(machine.driver)}, CUDA up to {_or_na(machine.cuda)}"]
    else:
        parts.append("[bold]No GPU found[/]: training runs on the CPU")
    if machine.note:
        parts.append(f"[yellow]{escape(machine.note)}[/]")
    cpu = f"{_or_na(host.cpu_model)}, {host.cpu_cores} usable cores"
    parts.append(f"CPU: {cpu}, bf16 instructions: {_or_na(host.cpu_bf16)}")
    parts.append(f"RAM: {memory_text(host.ram_free_bytes, host.ram_total_bytes)}{host.ram_limit_text}")
    return Group(*parts)


def memory_table(machine: Machine, available: int | None) -> RenderableType:
    """The output of `make memory-check`."""
    lines = []
    for gpu in machine.gpus:
        users = escape("; ".join(process_text(process) for process in gpu.processes) or "none")
        memory = memory_text(gpu.free_bytes, gpu.total_bytes)
        lines.append(f"GPU {gpu.index} {gpu.name}: {memory}; processes: {users}")
    memory = memory_text(machine.ram_free_bytes, machine.host.ram_total_bytes)
    lines.append(f"RAM: {memory}{machine.host.ram_limit_text}")
    amount = format_bytes(available) if available is not None else "n/a"
    if machine.gpus:
        limit = "; limited by the GPU with the least free memory" if len(machine.gpus) > 1 else ""
        lines.append(f"[bold]Available to a run: {amount} per GPU[/], including the CUDA context{limit}")
    else:
        lines.append(f"[bold]Available to a run: {amount} of RAM, shared by its processes[/]")
    return Group(*lines)
