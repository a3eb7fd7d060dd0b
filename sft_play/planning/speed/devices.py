"""How fast the devices of a machine are: as measured before, else as their data sheet says.

What operations cost is measured once per device (`measurement.py`), what communication costs by the ranks of
the first run of several processes (`train/ranks.py`). Units: seconds, bytes of the whole tensor that is
reduced or gathered.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import psutil
from pydantic import TypeAdapter

from sft_play.cache import entry, read_bytes, read_value, update_value, write_bytes
from sft_play.config.schema import RunConfig
from sft_play.engines.base import Message
from sft_play.errors import LaunchError
from sft_play.fingerprints import installed_versions
from sft_play.machine.gpus import Machine
from sft_play.machine.links import links_of, rate_of
from sft_play.machine.process import importing_libraries
from sft_play.planning.budget import training_device, training_threads
from sft_play.planning.candidates.drafts import choose_precision
from sft_play.planning.speed.plausible import believed
from sft_play.planning.speed.profile import BUSY, PACKAGES, Curve, DeviceProfile, derived_from_data_sheet
from sft_play.ui.console import warn
from sft_play.ui.progress import spinner

CPU_FLOPS_PER_CORE, CPU_BANDWIDTH = 30e9, 10e9  # of a CPU that has not been measured: fp32, vector units
BF16 = "bfloat16"  # the 16-bit type of CPUs and of most GPUs
FORMAT = 6  # increase it when devices must be measured again
COLLECTIVES_FORMAT = 4  # and this one when communication must be
SIZES = (1 << 14, 1 << 18, 1 << 22, 1 << 26)  # of measured tensors
LATENCY_S = 20e-6  # of a collective over a link of which only the data sheet is known
# Times that the tensor goes around the ring of processes; each of them sends (n - 1) / n of it every time.
# Of an all-to-all, each process sends (n - 1) / n of its own tensor.
ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


def peak_flops(machine: Machine) -> float | None:
    """Dense FLOP/s of the slowest GPU in 16 bits, by its data sheet; None if unknown, and of a CPU."""
    slowest = min((gpu.tflops or 0.0 for gpu in machine.gpus), default=0.0)
    return 1e12 * slowest or None


def derived_profile(machine: Machine, processes: int) -> DeviceProfile | None:
    """The profile of the slowest GPU by its data sheet, None if that is unknown, or of a share of the CPU."""
    name = device_name(machine)
    if not machine.gpus:
        flops = CPU_FLOPS_PER_CORE * (machine.host.cpu_cores or 1) / processes
        return derived_from_data_sheet(name, "cpu", flops, CPU_BANDWIDTH / processes)
    slowest = min(machine.gpus, key=lambda gpu: gpu.tflops or 0)
    if not slowest.tflops or not slowest.bandwidth_gb_s:
        return None
    return derived_from_data_sheet(
        name,
        "cuda",
        1e12 * slowest.tflops,
        1e9 * slowest.bandwidth_gb_s,
        best_flops=1e12 * slowest.matmul_tflops if slowest.matmul_tflops else None,
        compute_capability=slowest.compute_capability or (0, 0),
    )


def device_name(machine: Machine) -> str:
    """The name of the first GPU, or of the CPU."""
    return machine.gpus[0].name if machine.gpus else machine.host.cpu_model or "CPU"


def profile_path(device: str, threads: int | None) -> Path:
    """Where a device's measured profile is kept, for the installed versions and a CPU's number of threads."""
    return entry("profiles", device, threads, FORMAT, installed_versions(PACKAGES))


def read_profile(device: str, threads: int | None) -> DeviceProfile | None:
    """The profile of a device as it was measured, also while the machine was busy; None if there is none."""
    content = read_bytes(profile_path(device, threads))
    return None if content is None else DeviceProfile.from_json(content.decode())


def _believed(machine: Machine, threads: int | None) -> DeviceProfile | None:
    """The measured profile of this machine's device, as far as plans may count on it."""
    found = read_profile(device_name(machine), threads)
    return None if found is None or found.disturbed else checked(found, machine)


def checked(profile: DeviceProfile, machine: Machine) -> DeviceProfile:
    """The measured profile of this machine's device, without what its data sheet says cannot be true."""
    cores = machine.host.cpu_cores or 1
    sheet = derived_profile(machine, max(1, cores // (profile.threads or cores)))
    return profile if sheet is None else believed(profile, sheet)


def write_profile(device: str, threads: int | None, profile: DeviceProfile) -> None:
    """Keeps a measured profile."""
    write_bytes(profile_path(device, threads), profile.to_json().encode())


def forget_profile(machine: Machine, processes: int) -> None:
    """Deletes what was measured of this machine's device, so that the next run measures it again."""
    for count in {1, processes}:
        profile_path(device_name(machine), training_threads(machine, count)).unlink(missing_ok=True)


def saved_profile(
    machine: Machine, processes: int, *, again: bool = False, sixteen_bit: bool = True
) -> DeviceProfile:
    """The profile of this machine's device, measured now unless it has been measured before.

    The processes that will train share a CPU's cores. What was measured on a busy machine is measured again
    once it is idle; no plan counts on it before. `again` measures in any case, and forgets what communication
    costs. Without `sixteen_bit` products, a CPU is measured sooner; of a GPU they are never left out.

    Raises:
        LaunchError: the measurement failed.
    """
    name, threads = device_name(machine), training_threads(machine, processes)
    found = None if again else read_profile(name, threads)
    if found is not None and found.disturbed:
        if psutil.cpu_percent(interval=0.2) >= 100 * BUSY:
            return found  # it cannot be measured better now
        found = None
    if found is not None and (BF16 in found.products or not (sixteen_bit and threads)):
        return found
    with importing_libraries():
        from sft_play.planning.speed import measurement

    with spinner("measuring what operations cost here, once"):
        if found is not None:
            profile = measurement.with_sixteen_bit(found)
        elif threads:
            profile = measurement.measure(name, threads, sixteen_bit=sixteen_bit)
        else:
            profile = measurement.measure_in_child(name)
    write_profile(name, threads, profile)
    if again:
        collectives_path(name).unlink(missing_ok=True)
    return profile


def ensure_profile(config: RunConfig, machine: Machine, processes: int) -> None:
    """Measures what a run needs to know of this machine's device, unless it has been measured before.

    If that fails, plans are based on the data sheet.

    Raises:
        ConfigError: the config sets a precision that the device does not support.
    """
    dtype, autocast = choose_precision(config, training_device(machine))
    try:
        saved_profile(machine, processes, sixteen_bit=dtype == BF16 or autocast == "bf16")
    except LaunchError as error:
        warn(str(error))


def profile_of(machine: Machine, processes: int) -> DeviceProfile | None:
    """The profile of each process's device, as measured before or from its data sheet; None if not even that.

    What was measured while the machine was busy does not count, nor what cannot be true. What was measured
    for one process on a CPU is shared by several, as far as these were not measured. Processes that have less
    than a core each are slower by as much.
    """
    threads = training_threads(machine, processes)
    found, cores = _believed(machine, threads), machine.host.cpu_cores or 1
    if found and threads and processes * min(threads, cores) > cores:
        found = found.slowed(processes * min(threads, cores) / cores)
    if processes > 1 and not machine.gpus and (found is None or BF16 not in found.products):
        whole = _believed(machine, training_threads(machine, 1))
        shared = whole.shared_by(processes) if whole else None
        if found and shared:
            found = replace(found, products={**shared.products, **found.products})
        else:
            found = found or shared
    return found or derived_profile(machine, processes)


def only_while_busy(machine: Machine, processes: int) -> bool:
    """Whether the device was measured for these processes, but never without other programs beside it."""
    name, profile = device_name(machine), profile_of(machine, processes)
    measured = [read_profile(name, training_threads(machine, count)) for count in {1, processes}]
    return not (profile and profile.measured) and any(one and one.disturbed for one in measured)


@dataclass(frozen=True)
class Collectives:
    """Seconds of the collective operations of a number of processes, by the bytes of the tensor.

    An all-to-all is not measured: each process sends as many bytes as in an all-gather, so it is taken to
    last as long.
    """

    all_reduce: Curve
    all_gather: Curve
    reduce_scatter: Curve  # which gloo computes as a copy and an all-reduce
    measured: bool = True

    def seconds(self, messages: Iterable[Message]) -> float:
        """Seconds of the messages, one after the other."""
        curves = {
            "all_reduce": self.all_reduce,
            "all_gather": self.all_gather,
            "reduce_scatter": self.reduce_scatter,
            "all_to_all": self.all_gather,
        }
        return sum(
            (one.times * float(curves[one.kind].at(np.array(one.tensor_bytes))) for one in messages), 0.0
        )

    @classmethod
    def over_link(cls, bytes_per_s: float, processes: int, latency_s: float = LATENCY_S) -> "Collectives":
        """As derived from the speed of the link from one device to another, one way."""

        def curve(kind: str) -> Curve:
            share = ROUNDS[kind] * (processes - 1) / processes
            return Curve.of(SIZES, lambda size: latency_s + share * size / bytes_per_s)

        return cls(curve("all_reduce"), curve("all_gather"), curve("reduce_scatter"), measured=False)


def collectives_path(device: str) -> Path:
    """Where what was measured between such devices is kept, for the installed version of torch."""
    return entry("collectives", device, COLLECTIVES_FORMAT, installed_versions(("torch",)))


def read_collectives(device: str) -> dict[int, Collectives]:
    """What was measured between such devices, by number of processes."""
    tree = read_value(collectives_path(device)) or {}
    return dict(sorted(TypeAdapter(dict[int, Collectives]).validate_python(tree).items()))


def write_collectives(device: str, processes: int, measured: Collectives) -> None:
    """Adds what was measured between so many processes."""
    update_value(collectives_path(device), lambda known: known | {str(processes): asdict(measured)})


def collectives_of(
    machine: Machine, processes: int, replicas: int = 1, *, best: bool = False
) -> Collectives | None:
    """What communication between processes costs, as measured before or from the data sheet.

    With several replicas of a divided model, weights are gathered inside a machine, and gradients reduced
    over machines. Not measured, links are as slow as they can be, or with `best` as fast. None for one
    process, and of a CPU that was not measured.
    """
    if replicas > 1:
        inside = collectives_of(machine, processes // replicas, best=best)
        links = links_of(machine, processes, replicas)
        across = Collectives.over_link(rate_of(links[1], best), replicas) if links else None
        return inside and across and replace(inside, all_reduce=across.all_reduce, measured=False)
    if processes == 1:
        return None
    measured = {} if machine.what_if else read_collectives(device_name(machine))
    if processes in measured:
        return measured[processes]
    links = links_of(machine, processes)
    return Collectives.over_link(rate_of(links[0], best), processes) if links else None
