"""Whether the installed PyTorch can use the GPUs of this machine."""

import importlib
import math
import os
import re
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sft_play.errors import ConfigError
from sft_play.machine.compiler import missing_for_compiler
from sft_play.machine.gpus import Gpu, Machine
from sft_play.spelling import make

NVIDIA = "0x10de"  # a vendor of PCI devices
DISPLAY = "0x03"  # how the class of a GPU begins
A_GPU = re.compile("[0-9]|GPU-|MIG-")  # in CUDA_VISIBLE_DEVICES; all else hides all GPUs, as SLURM does
OF_DEBIAN = " (on Debian and Ubuntu: apt-get install gcc python3-dev)"
HOW_TO_INSTALL = "docs/guides/install.md#cuda"


class Wheels(NamedTuple):
    """A published build of PyTorch 2.13: its CUDA, the oldest driver, the oldest and the newest GPUs."""

    version: str
    driver: int
    oldest: tuple[int, int]
    newest: tuple[int, int]

    @property
    def tag(self) -> str:
        """As PyTorch's indexes are named."""
        return f"cu{self.version.replace('.', '')}"

    def have_code_for(self, gpus: Iterable[Gpu]) -> bool:
        """Whether they run on all of these GPUs."""
        capabilities = [gpu.compute_capability for gpu in gpus if gpu.compute_capability]
        return all(self.oldest <= each <= self.newest for each in capabilities)


ANY_LATER = (99, 0)
# PyPI's first; that for 13.2 is for the same GPUs. Sources: pytorch #172352 and #190355, and NVIDIA's "Minor
# Version Compatibility".
PUBLISHED = (Wheels("13.0", 580, (7, 5), ANY_LATER), Wheels("12.6", 525, (5, 0), (9, 0)))


class Build(NamedTuple):
    """What is known of the installed PyTorch."""

    version: str
    cuda: str | None  # that it is built for, such as "13.0"
    finds_gpus: bool
    says: str = ""  # why it finds none
    codes: tuple[str, ...] = ()  # for GPUs that it has code for: "sm_75"; or "compute_120", and any later one
    lacks: str | None = None  # what its kernels in Triton need, among them that of each loss, and is not here


def why_unusable(machine: Machine) -> tuple[str, str] | None:
    """What keeps PyTorch from this machine's GPUs, and what to do; None if nothing, or it has none."""
    return problem_of(machine, installed_build()) if machine.gpus else None


def require_usable(machine: Machine) -> None:
    """Raises a ConfigError if PyTorch cannot use the GPUs of this machine, or those that are asked for."""
    asked = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    if not machine.gpus and machine.driver and A_GPU.match(asked):
        raise ConfigError(f"{machine.note}; `{make('gpu-info')}` without it lists them, empty it is the CPU")
    if not machine.what_if and (problem := why_unusable(machine)):
        what, fix = problem
        raise ConfigError(f"{what}; {fix}, or set CUDA_VISIBLE_DEVICES to other GPUs, empty to use the CPU")


def why_left_out(machine: Machine, root: Path = Path("/")) -> str | None:
    """Why an NVIDIA GPU of this machine is not used, though nobody hides it; None if there is none.

    In a container, /sys below `root` shows GPUs that it has not got.
    """
    if machine.gpus or "CUDA_VISIBLE_DEVICES" in os.environ:
        return None
    for device in (root / "sys/bus/pci/devices").glob("*"):
        with suppress(OSError):
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
            if vendor == NVIDIA and kind.startswith(DISPLAY):
                what = f"this machine has an NVIDIA GPU, which is not used: {machine.note}"
                return f"{what}; see what `nvidia-smi` says, and give containers their GPUs (--gpus all)"
    return None


def installed_build() -> Build:
    """The PyTorch of this Python, which is imported."""
    torch = importlib.import_module("torch")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        finds = torch.cuda.is_available()
    codes = tuple(torch.cuda.get_arch_list()) if finds else ()
    why = str(said[-1].message).strip().partition("\n")[0] if said else ""
    return Build(torch.__version__, torch.version.cuda, finds, why, codes, missing_for_compiler("cuda"))


def problem_of(machine: Machine, build: Build) -> tuple[str, str] | None:
    """As `why_unusable`, of this build; pure."""
    named, fix = f"torch {build.version}", how_to_use_gpus(machine)
    if build.cuda is None:
        return f"{named} is a CPU build, but this machine has a GPU", fix
    if not build.finds_gpus:
        if machine.cuda and int(machine.cuda.partition(".")[0]) < int(build.cuda.partition(".")[0]):
            upto = f"but driver {machine.driver} supports CUDA up to {machine.cuda}"
            return f"{named} is built for CUDA {build.cuda}, {upto}", fix
        if (fitting := wheels_for(machine)) and fitting.version[:2] == build.cuda[:2]:
            fix = "see what `nvidia-smi` says, and restart the machine after an update of its driver"
        return f"{named} finds no GPU that it can use: {build.says or 'it does not say why'}", fix
    for gpu in machine.gpus:
        if not _has_code_for(gpu, build):
            capability = "{}.{}".format(*gpu.compute_capability or ())
            return f"{named} for CUDA {build.cuda} has no code for {gpu.name} ({capability})", fix
    if build.lacks:
        return f"training on a GPU needs {build.lacks}, which is not installed", f"install it{OF_DEBIAN}"
    return None


def _has_code_for(gpu: Gpu, build: Build) -> bool:
    """Whether its code runs on a GPU: that of its generation, no later than it, or what is compiled there.

    Source: the CUDA C++ programming guide, "Binary Compatibility" and "PTX Compatibility".
    """
    if gpu.compute_capability is None:
        return True
    major, minor = gpu.compute_capability
    for kind, number, family in re.findall(r"(sm|compute)_(\d+)([af]?)", " ".join(build.codes)):
        of_major, of_minor = divmod(int(number), 10)
        same = of_major == major and (of_minor == minor if family == "a" else of_minor <= minor)
        if same or (kind == "compute" and not family and (of_major, of_minor) <= (major, minor)):
            return True
    return False


def wheels_for(machine: Machine) -> Wheels | None:
    """The first published build that its driver and all its GPUs can use."""
    driver = _driver_branch(machine)
    return next(
        (each for each in PUBLISHED if driver >= each.driver and each.have_code_for(machine.gpus)), None
    )


def how_to_use_gpus(machine: Machine) -> str:
    """What makes the GPUs of a machine usable: another build of PyTorch, another driver, or fewer GPUs."""
    if wheels := wheels_for(machine):
        return f"install PyTorch for CUDA {wheels.version}: {HOW_TO_INSTALL}"
    names = ", ".join(dict.fromkeys(gpu.name for gpu in machine.gpus))
    if drivers := [each.driver for each in PUBLISHED if each.have_code_for(machine.gpus)]:
        return f"update the driver to {min(drivers)} or newer, which PyTorch needs for {names}"
    return f"no published build of PyTorch has code for all of {names}"


def _driver_branch(machine: Machine) -> float:
    """The first number of its driver's version; infinite if it has no known one."""
    branch = (machine.driver or "").partition(".")[0]
    return int(branch) if branch.isdecimal() else math.inf
