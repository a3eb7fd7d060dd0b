"""Writes accelerate's config for this machine."""

import subprocess
import sys

from sft_play.errors import LaunchError, StorageError
from sft_play.files import write_atomic
from sft_play.launch.accelerate import CONFIGS, CPU_PROCESSES
from sft_play.launch.default_config import default_config_path
from sft_play.machine.gpus import Machine, detect
from sft_play.runlog import console


def setup_accelerate(auto: bool, machine: Machine | None = None) -> int:
    """Writes accelerate's default config, with its wizard or automatically from this machine's devices.

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
            backup = path.with_suffix(".yaml.before")
            path.replace(backup)
            console().print(f"moved the earlier file to {backup}")
        write_atomic(path, text)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from None
    console().print(f"{path}\n{text}", markup=False, soft_wrap=True)
    return 0


def default_config(machine: Machine) -> str:
    """The shipped config for this machine, with its number of processes filled in."""
    count = len(machine.gpus)
    if count == 1:
        return (CONFIGS / "single_gpu.yaml").read_text(encoding="utf-8")
    text = (CONFIGS / ("ddp.yaml" if count else "ddp_cpu.yaml")).read_text(encoding="utf-8")
    old = next((line for line in text.splitlines() if line.startswith("num_processes:")), None)
    if old is None:
        raise LaunchError(
            f"a config in {CONFIGS} has no num_processes; restore it with `git checkout -- {CONFIGS}`"
        )
    return text.replace(old, f"num_processes: {count or CPU_PROCESSES}")
