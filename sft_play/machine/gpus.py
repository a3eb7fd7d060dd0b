"""Detects the hardware without torch: GPUs through NVML, CPU and RAM through /proc and cgroups.

`what_if` describes a machine that is not present. Values that cannot be determined are None and shown as
"n/a"; nothing is guessed.
"""

import importlib
import itertools
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from sft_play.errors import ConfigError
from sft_play.machine.catalogue import (
    LARGEST_MACHINE,
    SPECS_FILE,
    Specs,
    find_specs,
    link_speed,
    nearest_names,
)
from sft_play.machine.host import Host, detect_host
from sft_play.spelling import make, quoted, var
from sft_play.units import GIB, MIB

BF16_SINCE, FP16_SINCE = (8, 0), (5, 3)  # compute capability with native support
MAX_NVLINKS = 18  # NVML_NVLINK_MAX_LINKS


@dataclass(frozen=True)
class GpuProcess:
    """A process that uses GPU memory; name and size are None if the driver does not report them."""

    pid: int
    name: str | None
    used_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU or MIG instance; `index` is the number that CUDA will give it."""

    index: int
    name: str
    uuid: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None
    mig: bool = False
    link: str | None = None
    processes: tuple[GpuProcess, ...] = ()  # other processes that use it
    own_bytes: int | None = None  # what this process uses of its memory
    tflops: float | None = None  # dense 16-bit TFLOP/s with FP32 accumulation, from configs/hardware.yaml
    matmul_tflops: float | None = None  # that products of the best shape have been seen to reach
    bandwidth_gb_s: float | None = None
    host_link: str | None = None  # to RAM, where `link` is another one
    bridge: str | None = None  # NVLink of two of them, if somebody has bought one; of a what-if machine
    network_gb_s: float | None = None  # to a GPU of another machine, in one direction

    @property
    def link_gb_s(self) -> float | None:
        """GB/s to another GPU over `link`, in one direction; None if unknown."""
        return link_speed(self.link, self.compute_capability)

    @property
    def link_is_pcie(self) -> bool:
        """Whether `link` is known, and no NVLink."""
        return (self.link or "").startswith("PCIe")

    @property
    def bf16(self) -> bool | None:
        """Whether it has native bf16 arithmetic."""
        return self._computes_like(BF16_SINCE)

    @property
    def fp16(self) -> bool | None:
        """Whether it has native fp16 arithmetic."""
        return self._computes_like(FP16_SINCE)

    def _computes_like(self, capability: tuple[int, int]) -> bool | None:
        return None if self.compute_capability is None else self.compute_capability >= capability


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Everything that planning and launching need to know about a machine."""

    gpus: tuple[Gpu, ...]
    note: str  # why there are no GPUs, or which ones are hidden; "" otherwise
    driver: str | None = None
    cuda: str | None = None
    host: Host
    what_if: bool = False


def detect(nvml: Any = None, root: Path = Path("/")) -> Machine:
    """Detects this machine, by NVML, and by /proc and /sys below `root`; respects CUDA_VISIBLE_DEVICES."""
    host = detect_host(root)
    try:
        nvml = nvml or importlib.import_module("pynvml")
    except ImportError:
        note = f"nvidia-ml-py is not installed, so GPUs cannot be detected; run `{make('install')}`"
        return Machine(gpus=(), note=note, host=host)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        note = f"no NVIDIA driver that works ({str(error).strip() or type(error).__name__})"
        if platform.system() == "Darwin":
            note = "the GPU of a Mac (MPS) is not used: plans and kernels are for CUDA and CPUs"
        return Machine(gpus=(), note=note, host=host)
    try:
        # those that are denied to a job by its control group are counted too; CUDA does not number them
        handles = (_ask(nvml, "nvmlDeviceGetHandleByIndex", i) for i in range(nvml.nvmlDeviceGetCount()))
        devices = [handle for handle in handles if handle is not None]
        visible, note = _visible(nvml, devices, os.environ.get("CUDA_VISIBLE_DEVICES"))
        gpus = tuple(_gpu(nvml, index, handle, mig) for index, (handle, mig) in enumerate(visible))
        cuda = _ask(nvml, "nvmlSystemGetCudaDriverVersion_v2")
        return Machine(
            gpus=gpus,
            note=note,
            driver=_ask(nvml, "nvmlSystemGetDriverVersion"),
            cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
            host=host,
        )
    finally:
        nvml.nvmlShutdown()


def _ask(nvml: ModuleType, function: str, *arguments: object) -> Any:
    """The result of an NVML function; None if this driver or GPU does not support it."""
    try:
        return getattr(nvml, function)(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def _mig_instances(nvml: ModuleType, device: object) -> list[Any]:
    mode = _ask(nvml, "nvmlDeviceGetMigMode", device)
    if not mode or not mode[0]:
        return []
    slots = range(_ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", device) or 0)
    instances = (_ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", device, slot) for slot in slots)
    return [instance for instance in instances if instance is not None]


def _visible(nvml: ModuleType, devices: list[Any], setting: str | None) -> tuple[list[tuple[Any, bool]], str]:
    """(device, whether it is a MIG instance) in the order of CUDA, and a note about the other devices."""
    instances = {
        number: found for number, device in enumerate(devices) if (found := _mig_instances(nvml, device))
    }
    every_instance = list(itertools.chain.from_iterable(instances.values()))
    if setting is None:
        if not instances:
            return [(device, False) for device in devices], ""
        whole = [(device, False) for number, device in enumerate(devices) if number not in instances]
        note = (
            f"{len(every_instance)} MIG instances, of which a process can use one: select it with "
            "CUDA_VISIBLE_DEVICES=MIG-<uuid> (nvidia-smi -L)"
        )
        return (whole, note) if whole else ([(every_instance[0], True)], note)

    def find(identifier: str) -> tuple[Any, bool] | None:
        if identifier.isdigit() and int(identifier) < len(devices):
            number = int(identifier)
            return (instances[number][0], True) if number in instances else (devices[number], False)
        is_mig = identifier.startswith("MIG-")
        if not is_mig and not identifier.startswith("GPU-"):
            return None
        for device in every_instance if is_mig else devices:
            if (_ask(nvml, "nvmlDeviceGetUUID", device) or "").startswith(identifier):
                return device, is_mig
        return None

    chosen: list[tuple[Any, bool]] = []
    for identifier in setting.split(","):
        device = find(identifier.strip())
        if device is None:  # like CUDA, stop at the first identifier that does not exist
            break
        chosen.append(device)
    if len(chosen) == len(devices):
        return chosen, ""
    return chosen, f"CUDA_VISIBLE_DEVICES={setting} shows {len(chosen)} of {len(devices)} GPUs"


def _gpu(nvml: ModuleType, index: int, handle: object, mig: bool) -> Gpu:
    name = _ask(nvml, "nvmlDeviceGetName", handle) or "unknown NVIDIA GPU"
    memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    parent = _ask(nvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle) if mig else handle
    capability = _ask(nvml, "nvmlDeviceGetCudaComputeCapability", parent)
    others = {process.pid: process for process in _processes(nvml, handle)}
    ours = others.pop(os.getpid(), None)
    specs = None if mig else find_specs(name)  # a MIG instance has a fraction of the speed
    gpu = Gpu(
        index=index,
        name=name,
        uuid=_ask(nvml, "nvmlDeviceGetUUID", handle),
        total_bytes=getattr(memory, "total", None),
        free_bytes=getattr(memory, "free", None),
        compute_capability=tuple(capability) if capability else None,  # type: ignore[arg-type]
        mig=mig,
        link=_link(nvml, parent),
        processes=tuple(others.values()),
        own_bytes=getattr(ours, "used_bytes", None),
    )
    return _with_speed(gpu, specs) if specs else gpu


def _with_speed(gpu: Gpu, specs: Specs) -> Gpu:
    return replace(
        gpu,
        tflops=specs.bf16_tflops or specs.fp16_tflops,
        matmul_tflops=specs.matmul_tflops,
        bandwidth_gb_s=specs.bandwidth_gb_s,
        host_link=specs.host_link,
    )


def _link(nvml: ModuleType, handle: object) -> str | None:
    """The fastest link to another GPU: "NVLink x 18" or "PCIe 4.0 x 16"."""
    active = sum(_ask(nvml, "nvmlDeviceGetNvLinkState", handle, link) == 1 for link in range(MAX_NVLINKS))
    if active:
        return f"NVLink x {active}"
    generation = _ask(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle)
    width = _ask(nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle)
    return f"PCIe {generation}.0 x {width}" if generation and width else None


def _processes(nvml: ModuleType, handle: object) -> Iterator[GpuProcess]:
    import psutil

    seen = set()
    for kind in ("Compute", "Graphics"):
        for process in _ask(nvml, f"nvmlDeviceGet{kind}RunningProcesses", handle) or []:
            if process.pid in seen:
                continue
            seen.add(process.pid)
            try:
                name = psutil.Process(process.pid).name()
            except psutil.Error:
                name = None  # it runs in another container
            yield GpuProcess(process.pid, name, process.usedGpuMemory)


def what_if(name: str, count: int = 1) -> Machine:
    """A hypothetical machine with `count` GPUs of a known model and all their memory free.

    It has at most eight GPUs: more are on other machines like it.

    Raises:
        ConfigError: the model is unknown (names the closest), its memory size is unknown, or `count`
            is below 1.
    """
    if count < 1:
        raise ConfigError(f"{var(NGPU=count)}: expected a positive integer, e.g. {var(NGPU=2)}")
    specs, asked = find_specs(name), var(GPU=quoted(name))
    if specs is None:
        closest = ", ".join(nearest_names(name))
        raise ConfigError(f"{asked} is unknown; closest: {closest}. All names: {SPECS_FILE}")
    if specs.memory_mib is None:
        raise ConfigError(
            f"the memory size of {asked} is not known; add memory_mib, as the driver reports it, to "
            f"{SPECS_FILE}"
        )
    major, minor = specs.compute_capability.split(".")
    memory = specs.memory_mib * MIB
    gpu = Gpu(
        index=0,
        name=specs.name,
        total_bytes=memory,
        free_bytes=memory,
        compute_capability=(int(major), int(minor)),
        link=specs.link,
        bridge=specs.bridge,
        network_gb_s=specs.network_gb_s,
    )
    alone = Machine(gpus=(_with_speed(gpu, specs),), note="", host=detect_host(), what_if=True)
    return with_gpus(alone, count)


def with_gpus(machine: Machine, count: int) -> Machine:
    """A hypothetical machine with `count` GPUs like the first of this one, or one of several like it."""
    first = machine.gpus[0]
    gpus = tuple(replace(first, index=index) for index in range(min(count, LARGEST_MACHINE)))
    return replace(machine, gpus=gpus, what_if=True)


def freest(machine: Machine) -> list[Gpu]:
    """The GPUs, those with the most whole GiB of free memory first."""
    return sorted(machine.gpus, key=lambda gpu: -((gpu.free_bytes or 0) // GIB))


def with_freest(machine: Machine, count: int) -> Machine:
    """The machine with so many of its GPUs, those with the most free memory."""
    return replace(machine, gpus=tuple(freest(machine)[:count]))


def to_json(machine: Machine) -> dict[str, object]:
    """The output of `sft-play gpu-info --json`."""
    values = asdict(machine)
    for gpu, entry in zip(machine.gpus, values["gpus"], strict=True):
        entry.update(bf16=gpu.bf16, fp16=gpu.fp16)
    return values


def left_per_process(machine: Machine) -> int | None:
    """Bytes of memory that a process of a run may take: of the fullest GPU, or of RAM; None if unknown."""
    if not machine.gpus:
        return machine.host.ram_free_bytes
    known = [gpu.free_bytes for gpu in machine.gpus if gpu.free_bytes is not None]
    return min(known) if len(known) == len(machine.gpus) else None


def memory_report(machine: Machine) -> dict[str, object]:
    """The output of `sft-play memory-check --json`: free, used and total memory, and by whom it is used."""
    return {
        "gpus": [_gpu_report(gpu) for gpu in machine.gpus],
        "ram_total_bytes": machine.host.ram_total_bytes,
        "ram_free_bytes": machine.host.ram_free_bytes,
        "left_per_process_bytes": left_per_process(machine),
    }


def _gpu_report(gpu: Gpu) -> dict[str, object]:
    return {
        "index": gpu.index,
        "name": gpu.name,
        "total_bytes": gpu.total_bytes,
        "free_bytes": gpu.free_bytes,
        "processes": [vars(process) for process in gpu.processes],
    }
