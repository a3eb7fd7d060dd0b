"""The device profile that a plan is timed with: measured, now or before, or from a data sheet.

Likewise for the collective operations of several processes, which are measured by the ranks of a run
(train/ranks.py).
"""

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil

from sft_play.cache import entry, read_bytes, read_value, update_value, write_bytes
from sft_play.config.schema import RunConfig
from sft_play.errors import LaunchError
from sft_play.fingerprints import installed_versions
from sft_play.machine.gpus import Machine
from sft_play.machine.process import importing_libraries
from sft_play.planning.clock import Speed
from sft_play.planning.collectives import Collectives
from sft_play.planning.devices import training_device
from sft_play.planning.drafts import choose_precision
from sft_play.planning.profile import BUSY, PACKAGES, DeviceProfile, derived_from_data_sheet
from sft_play.report.progress import spinner
from sft_play.runlog import console

BF16 = "bfloat16"  # the 16-bit type of CPUs and of most GPUs
FORMAT = 3  # increase it when devices must be measured again


def profile_path(device: str, threads: int | None) -> Path:
    """Where a device's measured profile is kept, for the installed versions and a CPU's number of threads."""
    return entry("profiles", device, threads, FORMAT, installed_versions(PACKAGES))


def read_profile(device: str, threads: int | None) -> DeviceProfile | None:
    """The measured profile of a device; None if there is none."""
    content = read_bytes(profile_path(device, threads))
    return None if content is None else DeviceProfile.from_json(content.decode())


def write_profile(device: str, threads: int | None, profile: DeviceProfile) -> None:
    """Keeps a measured profile."""
    write_bytes(profile_path(device, threads), profile.to_json().encode())


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
    found = None if again else read_profile(name, threads)
    if found is not None and found.busy >= BUSY and _is_idle():
        found = None
    if found is not None and (BF16 in found.products or not sixteen_bit):
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
    write_profile(name, threads, profile)
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
    dtype, autocast = choose_precision(config, training_device(machine))
    try:
        saved_profile(machine, processes, sixteen_bit=dtype == BF16 or autocast.precision == "bf16")
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
    found = read_profile(name, threads)
    if processes > 1 and not machine.gpus and (found is None or BF16 not in found.products):
        whole = read_profile(name, training_threads(machine, 1))
        found = _completed(found, whole.shared_by(processes)) if whole else found
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
    """Where what was measured between such devices is kept, for the installed version of torch."""
    return entry("collectives", device, FORMAT, installed_versions(("torch",)))


def read_collectives(device: str) -> dict[int, Collectives]:
    """Number of processes -> what was measured between them."""
    trees = read_value(collectives_path(device)) or {}
    return {int(processes): Collectives.from_tree(tree) for processes, tree in trees.items()}


def write_collectives(device: str, processes: int, measured: Collectives) -> None:
    """Adds what was measured between so many processes."""
    update_value(collectives_path(device), lambda known: known | {str(processes): asdict(measured)})


def forget_collectives(machine: Machine) -> None:
    """Removes what was measured between processes, so that the next run of several measures it again."""
    collectives_path(device_name(machine)).unlink(missing_ok=True)


def collectives_trees(machine: Machine) -> dict[str, Any]:
    """What was measured between processes on this machine's devices, for JSON."""
    known = read_collectives(device_name(machine))
    return {str(processes): asdict(found) for processes, found in sorted(known.items())}


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
