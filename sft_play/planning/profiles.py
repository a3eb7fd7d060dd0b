"""The device profile that a plan is timed with: measured, now or before, shipped, or from a data sheet."""

import hashlib
import json
import os
import re
from pathlib import Path

from sft_play.errors import LaunchError
from sft_play.fingerprints import installed_versions
from sft_play.machine.catalogue import SPECS_FILE
from sft_play.machine.gpus import Machine
from sft_play.planning.clock import Speed
from sft_play.planning.profile import DeviceProfile, derived_from_data_sheet
from sft_play.report.progress import spinner
from sft_play.runlog import cache_dir, console

SHIPPED = SPECS_FILE.parent / "profiles"  # <device>.json for devices that have been measured
PACKAGES = ("torch", "transformers", "peft", "bitsandbytes")  # whose code is timed
FORMAT = 2  # increase it when devices must be measured again


def slug(device: str) -> str:
    """`slug("NVIDIA A100-SXM4-80GB")` is "nvidia-a100-sxm4-80gb"."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def profile_path(device: str, threads: int | None) -> Path:
    """The file of a device's measured profile, for the installed versions and a CPU's number of threads."""
    key = json.dumps([device, threads, FORMAT, installed_versions(PACKAGES)])
    return cache_dir() / "profiles" / f"{slug(device)}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"


def read_profile(path: Path) -> DeviceProfile | None:
    """A profile from a file; None if there is no readable one."""
    try:
        return DeviceProfile.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def device_name(machine: Machine) -> str:
    """The name of the first GPU, or of the CPU."""
    return machine.gpus[0].name if machine.gpus else machine.host.cpu_model or "CPU"


def training_threads(machine: Machine, processes: int) -> int | None:
    """Threads per process when training on the CPU, as the launcher sets them; None on GPUs."""
    if machine.gpus:
        return None
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() else max(1, (machine.host.cpu_cores or 1) // processes)


def saved_profile(machine: Machine, processes: int, *, again: bool = False) -> DeviceProfile:
    """The profile of this machine's device, measured now unless it has been measured before.

    Args:
        machine: this machine.
        processes: number of processes that will train on it; they share a CPU's cores.
        again: measure in any case.

    Raises:
        LaunchError: the measurement failed.
    """
    name, threads = device_name(machine), training_threads(machine, processes)
    path = profile_path(name, threads)
    found = None if again else read_profile(path)
    if found is not None:
        return found
    from sft_play.planning import profiling  # imports torch

    with spinner("measuring what operations cost here, once"):
        profile = profiling.measure(name, threads) if threads else profiling.measure_in_child(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(profile.to_json(), encoding="utf-8")
    temporary.replace(path)
    return profile


def ensure_profile(machine: Machine, processes: int) -> None:
    """Measures this machine's device unless it has been measured before.

    If that fails, plans are based on the data sheet.
    """
    try:
        saved_profile(machine, processes)
    except LaunchError as error:
        console().print(f"  [yellow]{error}[/]")


def profile_of(machine: Machine, speed: Speed, processes: int) -> DeviceProfile | None:
    """The profile of each process's device; nothing is measured here.

    Args:
        machine: to plan for.
        speed: from its data sheet, for a device without a profile.
        processes: number of processes that share a CPU.

    Returns:
        The profile; None if not even the data sheet is known.
    """
    name, threads = device_name(machine), training_threads(machine, processes)
    found = read_profile(profile_path(name, threads))
    if found is None and processes > 1 and not machine.gpus:
        whole = read_profile(profile_path(name, training_threads(machine, 1)))
        found = whole.shared_by(processes) if whole else None
    found = found or read_profile(SHIPPED / f"{slug(name)}.json")
    if found is not None:
        return found.with_link(speed.link_bandwidth)
    if not speed.flops or not speed.bandwidth:
        return None
    kind = "cuda" if machine.gpus else "cpu"
    return derived_from_data_sheet(name, kind, speed.flops, speed.bandwidth, speed.link_bandwidth)
