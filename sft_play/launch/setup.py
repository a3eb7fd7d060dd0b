"""The accelerate config of this machine, and what memory is left on it for a run."""

import subprocess
import sys
from typing import TYPE_CHECKING, Any

from sft_play.errors import LaunchError, StorageError
from sft_play.hardware import Machine, detect, memory_text, process_text
from sft_play.launch.accelerate import CONFIGS, CPU_PROCESSES
from sft_play.launch.default_config import default_config_path
from sft_play.runlog import console
from sft_play.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType


def setup_accelerate(auto: bool, machine: Machine | None = None) -> int:
    """Writes accelerate's default config: by asking (`accelerate config`), or from what this machine has.

    Raises:
        StorageError: the file cannot be written.
    """
    if not auto:
        return subprocess.call([sys.executable, "-m", "accelerate.commands.accelerate_cli", "config"])
    path = default_config_path()
    text = default_config(machine or detect())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.read_text(encoding="utf-8") != text:
            kept = path.with_suffix(".yaml.before")
            path.replace(kept)
            console().print(f"the earlier file is now {kept}")
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from None
    console().print(f"{path}\n{text}", markup=False, soft_wrap=True)
    return 0


def default_config(machine: Machine) -> str:
    """The shipped config that fits the machine, with its number of processes in it."""
    count = len(machine.gpus)
    if count == 1:
        return (CONFIGS / "single_gpu.yaml").read_text(encoding="utf-8")
    text = (CONFIGS / ("ddp.yaml" if count else "ddp_cpu.yaml")).read_text(encoding="utf-8")
    old = next((line for line in text.splitlines() if line.startswith("num_processes:")), None)
    if old is None:
        raise LaunchError(f"{CONFIGS} has a config without num_processes; restore it with git checkout")
    return text.replace(old, f"num_processes: {count or CPU_PROCESSES}")


def memory_report(machine: Machine) -> dict[str, Any]:
    """What `sft-play memory-check --json` prints: free and total bytes, who holds the rest, what each process could take."""
    free = [gpu.free_bytes for gpu in machine.gpus]
    known = [value for value in free if value is not None]
    if machine.gpus:
        left = min(known) if len(known) == len(free) else None
    else:
        left = machine.ram_free_bytes
    return {
        "gpus": [
            {
                "index": gpu.index,
                "name": gpu.name,
                "total_bytes": gpu.total_bytes,
                "free_bytes": gpu.free_bytes,
                "processes": [vars(process) for process in gpu.processes],
            }
            for gpu in machine.gpus
        ],
        "ram_total_bytes": machine.host.ram_total_bytes,
        "ram_free_bytes": machine.ram_free_bytes,
        "left_per_process_bytes": left,
    }


def memory_table(machine: Machine) -> "RenderableType":
    """What `make memory-check` shows a person."""
    from rich.console import Group
    from rich.markup import escape

    lines = []
    for gpu in machine.gpus:
        users = "; ".join(process_text(process) for process in gpu.processes) or "nobody"
        lines.append(f"GPU {gpu.index} {gpu.name}: {memory_text(gpu.free_bytes, gpu.total_bytes)}; used by {escape(users)}")
    lines.append(f"RAM: {memory_text(machine.ram_free_bytes, machine.host.ram_total_bytes)}{machine.host.ram_limit_text}")
    left = memory_report(machine)["left_per_process_bytes"]
    amount = format_bytes(left) if left is not None else "n/a"
    if machine.gpus:
        fullest = "; the fullest one decides" if len(machine.gpus) > 1 else ""
        lines.append(f"[bold]Left for a run: {amount} on each GPU[/], its CUDA context included{fullest}")
    else:
        lines.append(f"[bold]Left for a run: {amount} of RAM, shared by all its processes[/]")
    return Group(*lines)
