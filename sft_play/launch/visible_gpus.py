"""Which GPUs a command uses, of those of this machine: chosen before anything imports PyTorch."""

import os
import sys

from sft_play.errors import ConfigError
from sft_play.machine.gpus import Machine, detect, freest
from sft_play.spelling import var
from sft_play.units import counted
from sft_play.upstream.patching import lasts_to_the_end


def use_freest_gpus(count: int) -> str | None:
    """Lets so many processes of this machine use the GPUs with the most free memory; 0: one for each GPU.

    The others are hidden from this process and from those that it starts. CUDA reads once which there are,
    so a process that has PyTorch already, as that of a notebook, trains on the first one.

    Returns:
        What to say about it; None if all GPUs are used, or it is too late to choose.

    Raises:
        ConfigError: there are fewer GPUs.
    """
    machine, asked = detect(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if count > len(machine.gpus) > 0:
        shown = f" that CUDA_VISIBLE_DEVICES={asked} shows" if asked else ""
        found = f"this machine has {counted(len(machine.gpus), 'GPU')}{shown}"
        raise ConfigError(f"{var(NGPU=count)}: {found}, and each process needs one of its own")
    if count in (0, len(machine.gpus)) or not machine.gpus or (count == 1 and _too_late()):
        return None
    names, chosen = _names(machine), sorted(gpu.index for gpu in freest(machine)[:count])
    used = [names[index] for index in chosen]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(used)
    return (
        f"on GPU {', '.join(used)} of {', '.join(names)}, with the most free memory; "
        f"CUDA_VISIBLE_DEVICES chooses others, {var(NGPU=0)} uses all"
    )


def put_freest_gpu_first() -> None:
    """Lets the GPU with the most free memory be CUDA's first, which a model goes to if it fits there."""
    machine = detect()
    order = [gpu.index for gpu in freest(machine)]
    if order != sorted(order) and not _too_late():
        names = _names(machine)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[index] for index in order)


def _too_late() -> bool:
    """Whether CUDA may know already which GPUs there are, or would in a later command of this process."""
    return "torch" in sys.modules or not lasts_to_the_end()


def _names(machine: Machine) -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls the GPUs that it shows now."""
    if asked := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return [name.strip() for name in asked.split(",")]
    mig = bool(machine.note)  # it tells of MIG instances, without which GPUs have other numbers
    return [str(gpu.uuid if mig else gpu.index) for gpu in machine.gpus]
