"""Console tables about a machine: GPUs, memory, and the processes that use them."""

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from sft_play.machine.gpus import Gpu, GpuProcess, Machine
from sft_play.report.table import Table, on_screen
from sft_play.report.tables import formatted
from sft_play.ui.screen import Words
from sft_play.units import counted, format_bytes


def _or_na(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "n/a" if value is None else str(value)


def memory_text(free: int | None, total: int | None) -> str:
    """`memory_text(5 * GIB, 24 * GIB)` is "5.00 GiB free of 24.00 GiB"."""
    return f"{formatted(free, format_bytes)} free of {formatted(total, format_bytes)}"


def process_text(process: GpuProcess) -> str:
    """Process id, name and memory: "4021 python 3.10 GiB"."""
    return f"{process.pid} {process.name or 'n/a'} {formatted(process.used_bytes, format_bytes)}"


def _users(gpu: Gpu) -> str:
    return "; ".join(process_text(process) for process in gpu.processes) or "none"


def _gpu_row(gpu: Gpu) -> tuple[str, ...]:
    capability = ".".join(map(str, gpu.compute_capability)) if gpu.compute_capability else "n/a"
    sizes = (formatted(size, format_bytes) for size in (gpu.free_bytes, gpu.total_bytes))
    facts = map(_or_na, (gpu.bf16, gpu.fp16, gpu.link))
    return str(gpu.index), gpu.name + (" (MIG)" if gpu.mig else ""), *sizes, capability, *facts


def gpu_info_table(machine: Machine) -> RenderableType:
    """The output of `make gpu-info`."""
    host = machine.host
    parts: list[Any] = []
    if machine.gpus:
        head = ("", "GPU", "free", "of", "compute", "bf16", "fp16", "link")
        table = on_screen(Table(head, [_gpu_row(gpu) for gpu in machine.gpus], left=(0, 1, 7)), gap=2)
        users = (f"processes on GPU {gpu.index}: {_users(gpu)}" for gpu in machine.gpus)
        parts += [table, *(Words(line, hang=2) for line in users)]
        parts.append(f"driver {_or_na(machine.driver)}, CUDA up to {_or_na(machine.cuda)}")
    else:
        parts.append(Text.assemble(("No GPU found", "bold"), ": training runs on the CPU"))
    if machine.note:
        parts.append(Words(Text(machine.note, style="yellow")))
    cpu = f"{_or_na(host.cpu_model)}, {counted(host.cpu_cores, 'usable core')}"
    parts.append(Words(f"CPU: {cpu}, bf16 instructions: {_or_na(host.cpu_bf16)}"))
    parts.append(f"RAM: {memory_text(host.ram_free_bytes, host.ram_total_bytes)}{host.ram_limit_text}")
    return Group(*parts)


def memory_table(machine: Machine, available: int | None) -> RenderableType:
    """The output of `make memory-check`."""
    lines: list[str | Text] = []
    for gpu in machine.gpus:
        memory = memory_text(gpu.free_bytes, gpu.total_bytes)
        lines.append(f"GPU {gpu.index} {gpu.name}: {memory}; processes: {_users(gpu)}")
    memory = memory_text(machine.host.ram_free_bytes, machine.host.ram_total_bytes)
    lines.append(f"RAM: {memory}{machine.host.ram_limit_text}")
    who, what = "a run", " of RAM, shared by its processes"
    if machine.gpus:
        what = " per GPU, including the CUDA context"
    if len(machine.gpus) > 1:
        who, what = "a run on all GPUs", f"{what}; limited by the GPU with the least free memory"
        most = max((gpu.free_bytes for gpu in machine.gpus if gpu.free_bytes), default=None)
        lines.append(Text(f"Available to one process: {formatted(most, format_bytes)}", style="bold"))
    lines.append(Text(f"Available to {who}: {formatted(available, format_bytes)}{what}", style="bold"))
    return Group(*(Words(line, hang=2) for line in lines))
