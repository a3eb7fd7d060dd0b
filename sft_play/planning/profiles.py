"""The device profile that a plan is timed with: measured, now or before, shipped, or from a data sheet.

Likewise for the collective operations of several processes, which are measured by the ranks of a run
(train/exchange.py).
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil

from sft_play.config.schema import RunConfig
from sft_play.errors import LaunchError
from sft_play.fingerprints import installed_versions
from sft_play.machine.catalogue import SPECS_FILE
from sft_play.machine.collector import importing_libraries
from sft_play.machine.gpus import Machine
from sft_play.planning.clock import Speed
from sft_play.planning.collectives import Collectives
from sft_play.planning.devices import training_device
from sft_play.planning.drafts import choose_precision
from sft_play.planning.profile import BUSY, DeviceProfile, derived_from_data_sheet
from sft_play.report.progress import spinner
from sft_play.runlog import cache_dir, console

SHIPPED = SPECS_FILE.parent / "profiles"  # <device>.json for devices that have been measured
PACKAGES = ("torch", "transformers", "peft", "bitsandbytes")  # whose code is timed
SIXTEEN_BIT = "bfloat16"  # the 16-bit type of CPUs and of most GPUs
FORMAT = 3  # increase it when devices must be measured again


def slug(device: str) -> str:
    """`slug("NVIDIA A100-SXM4-80GB")` is "nvidia-a100-sxm4-80gb"."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def profile_path(device: str, threads: int | None) -> Path:
    """The file of a device's measured profile, for the installed versions and a CPU's number of threads."""
    key = json.dumps([device, threads, FORMAT, installed_versions(PACKAGES)])
    return cache_dir() / "profiles" / f"{slug(device)}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"


def keep(path: Path, text: str) -> None:
    """Writes a file of the cache, as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


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


def saved_profile(
    machine: Machine, processes: int, *, again: bool = False, sixteen_bit: bool = True
) -> DeviceProfile:
    """The profile of this machine's device, measured now unless it has been measured before.

    What was measured on a busy machine is measured again once it is idle.

    Args:
        machine: this machine.
        processes: number of processes that will train on it; they share a CPU's cores.
        again: measure in any case.
        sixteen_bit: whether products of 16-bit numbers are needed; without them a CPU is measured sooner.

    Raises:
        LaunchError: the measurement failed.
    """
    name, threads = device_name(machine), training_threads(machine, processes)
    path = profile_path(name, threads)
    found = None if again else read_profile(path)
    if found is not None and found.busy >= BUSY and _is_idle():
        found = None
    if found is not None and (SIXTEEN_BIT in found.products or not sixteen_bit):
        return found
    with importing_libraries():  # torch among them
        from sft_play.planning import profiling

    with spinner("measuring what operations cost here, once"):
        if found is not None:
            profile = profiling.with_sixteen_bit(found)
        elif threads:
            profile = profiling.measure(name, threads, sixteen_bit=sixteen_bit)
        else:
            profile = profiling.measure_in_child(name)
    keep(path, profile.to_json())
    return profile


def _is_idle() -> bool:
    """Whether other programs leave the CPU alone for a moment."""
    return psutil.cpu_percent(interval=0.2) < 100 * BUSY


def ensure_profile(config: RunConfig, machine: Machine, processes: int) -> None:
    """Measures what a run needs to know of this machine's device, unless it has been measured before.

    If that fails, plans are based on the data sheet.

    Raises:
        ConfigError: the config sets a precision that the device does not support.
    """
    dtype, autocast, _ = choose_precision(config, training_device(machine))
    try:
        saved_profile(machine, processes, sixteen_bit=dtype == SIXTEEN_BIT or autocast == "bf16")
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
    if processes > 1 and not machine.gpus and (found is None or SIXTEEN_BIT not in found.products):
        whole = read_profile(profile_path(name, training_threads(machine, 1)))
        found = _completed(found, whole.shared_by(processes)) if whole else found
    found = found or read_profile(SHIPPED / f"{slug(name)}.json")
    if found is not None:
        return found
    if not speed.flops or not speed.bandwidth:
        return None
    kind = "cuda" if machine.gpus else "cpu"
    return derived_from_data_sheet(name, kind, speed.flops, speed.bandwidth)


def _completed(found: DeviceProfile | None, other: DeviceProfile) -> DeviceProfile:
    """The profile that was found, with the products of types that only the other one has; else the other."""
    return replace(found, products={**other.products, **found.products}) if found else other


def collectives_path(device: str) -> Path:
    """The file of what was measured between processes on such devices, for the installed version of torch."""
    key = json.dumps([device, FORMAT, installed_versions(("torch",))])
    name = f"{slug(device)}-collectives-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"
    return cache_dir() / "profiles" / name


def read_collectives(device: str) -> dict[int, Collectives]:
    """Number of processes -> what was measured between them; empty if there is no readable file."""
    try:
        trees = json.loads(collectives_path(device).read_text(encoding="utf-8"))
        return {int(processes): Collectives.from_tree(tree) for processes, tree in trees.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def write_collectives(device: str, processes: int, measured: Collectives) -> None:
    """Adds what was measured between so many processes."""
    known = read_collectives(device) | {processes: measured}
    keep(collectives_path(device), json.dumps(_trees(known)))


def _trees(known: Mapping[int, Collectives]) -> dict[str, Any]:
    return {str(processes): asdict(found) for processes, found in sorted(known.items())}


def forget_collectives(machine: Machine) -> None:
    """Removes what was measured between processes, so that the next run of several measures it again."""
    collectives_path(device_name(machine)).unlink(missing_ok=True)


def collectives_trees(machine: Machine) -> dict[str, Any]:
    """What was measured between processes on this machine's devices, for JSON."""
    return _trees(read_collectives(device_name(machine)))


def collectives_of(machine: Machine, speed: Speed, processes: int) -> Collectives | None:
    """What communication between processes costs; nothing is measured here.

    Args:
        machine: to plan for.
        speed: from its data sheet.
        processes: number of processes.

    Returns:
        None for one process, and if neither a measurement nor the data sheet is known.
    """
    if processes == 1:
        return None
    measured = {} if machine.what_if else read_collectives(device_name(machine))
    if processes in measured:
        return measured[processes]
    return Collectives.over_link(speed.link_bandwidth, processes) if speed.link_bandwidth else None
