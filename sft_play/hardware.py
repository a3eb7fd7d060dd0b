"""What this machine has, without torch: NVIDIA GPUs by NVML, CPU and RAM by /proc and cgroups. Or a what-if machine.

What cannot be learned is None and shows as "n/a"; nothing is guessed.
"""

import difflib
import functools
import importlib
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_play.errors import ConfigError
from sft_play.host import Host, detect_host
from sft_play.units import MIB, format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

FACTS_FILE = Path(__file__).resolve().parent.parent / "configs" / "hardware.yaml"
BF16_SINCE, FP16_SINCE = (8, 0), (5, 3)  # compute capability with native arithmetic of that type
MOST_NVLINKS = 18  # NVML_NVLINK_MAX_LINKS

# Words that name the vendor or the kind of thing, but not the model.
NOISE = frozenset(
    ["nvidia", "geforce", "tesla", "rtx", "generation", "edition", "graphics", "gpu", "card", "tensor", "core"],
)


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory of a GPU; name or size are None where the driver does not tell."""

    pid: int
    name: str | None
    used_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU, or one MIG instance, in the order in which CUDA will number them."""

    index: int
    name: str
    uuid: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None
    mig: bool = False
    link: str | None = None
    processes: tuple[GpuProcess, ...] = ()
    tflops: float | None = None
    """Dense 16-bit TFLOP/s with FP32 accumulation, from configs/hardware.yaml."""
    bandwidth_gb_s: float | None = None

    @property
    def link_gb_s(self) -> float | None:
        """10^9 bytes a second to another GPU over `link`, one way; None where that is not known."""
        return link_speed(self.link, self.compute_capability)

    @property
    def bf16(self) -> bool | None:
        """Whether it computes in bf16 natively."""
        return None if self.compute_capability is None else self.compute_capability >= BF16_SINCE

    @property
    def fp16(self) -> bool | None:
        """Whether it computes in fp16 natively."""
        return None if self.compute_capability is None else self.compute_capability >= FP16_SINCE


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Everything that planning and launching need to know of a machine."""

    gpus: tuple[Gpu, ...]
    note: str
    """Why there are no GPUs, or which ones are hidden; "" where there is nothing to say."""
    driver: str | None = None
    cuda: str | None = None
    host: Host
    what_if: bool = False

    @property
    def ram_free_bytes(self) -> int | None:
        """RAM that a new process can take, within the limit of its container."""
        return self.host.ram_free_bytes


def detect(nvml: Any = None, root: Path = Path("/")) -> Machine:
    """Looks at this machine; honours CUDA_VISIBLE_DEVICES.

    Args:
        nvml: the NVML bindings (default: nvidia-ml-py).
        root: where /proc and /sys are found.
    """
    host = detect_host(root)
    try:
        nvml = nvml or importlib.import_module("pynvml")
    except ImportError:
        return Machine(gpus=(), note="nvidia-ml-py is not installed, so GPUs cannot be seen: make install", host=host)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Machine(gpus=(), note=f"no NVIDIA driver here ({_reason(error)})", host=host)
    try:
        devices = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        visible, note = _visible(nvml, devices, os.environ.get("CUDA_VISIBLE_DEVICES"))
        gpus = tuple(_gpu(nvml, index, handle, mig) for index, (handle, mig) in enumerate(visible))
        cuda = _ask(nvml, "nvmlSystemGetCudaDriverVersion_v2")
        return Machine(
            gpus=gpus,
            note=note,
            driver=_text(_ask(nvml, "nvmlSystemGetDriverVersion")),
            cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
            host=host,
        )
    finally:
        nvml.nvmlShutdown()


def _reason(error: Exception) -> str:
    return str(error).strip() or type(error).__name__


def _ask(nvml: Any, function: str, *arguments: Any) -> Any:
    """The answer of an NVML function, None where this driver or card has none."""
    try:
        return getattr(nvml, function)(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def _text(value: Any) -> str | None:
    return value.decode() if isinstance(value, bytes) else value  # older bindings return bytes


def _mig_instances(nvml: Any, device: Any) -> list[Any]:
    mode = _ask(nvml, "nvmlDeviceGetMigMode", device)
    if not mode or not mode[0]:
        return []
    slots = range(_ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", device) or 0)
    instances = (_ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", device, slot) for slot in slots)
    return [instance for instance in instances if instance is not None]


def _visible(nvml: Any, devices: list[Any], setting: str | None) -> tuple[list[tuple[Any, bool]], str]:
    """The devices that CUDA will number, each with whether it is a MIG instance, and what to tell about the others."""
    instances = {number: found for number, device in enumerate(devices) if (found := _mig_instances(nvml, device))}
    every_instance = [instance for found in instances.values() for instance in found]
    if setting is None:
        if not instances:
            return [(device, False) for device in devices], ""
        whole = [(device, False) for number, device in enumerate(devices) if number not in instances]
        note = f"{len(every_instance)} MIG instances, one a process: CUDA_VISIBLE_DEVICES=MIG-<uuid> chooses (nvidia-smi -L)"
        return (whole, note) if whole else ([(every_instance[0], True)], note)
    chosen: list[tuple[Any, bool]] = []
    for word in setting.split(","):  # like CUDA: the list ends at the first name that does not exist
        word = word.strip()
        if word.isdigit() and int(word) < len(devices):
            number = int(word)
            chosen.append((instances[number][0], True) if number in instances else (devices[number], False))
            continue
        pool = every_instance if word.startswith("MIG-") else devices if word.startswith("GPU-") else []
        match = next((d for d in pool if (_text(_ask(nvml, "nvmlDeviceGetUUID", d)) or "").startswith(word)), None)
        if match is None:
            break
        chosen.append((match, word.startswith("MIG-")))
    note = f"CUDA_VISIBLE_DEVICES={setting} shows {len(chosen)} of {len(devices)} GPUs"
    return chosen, note if len(chosen) != len(devices) else ""


def _gpu(nvml: Any, index: int, handle: Any, mig: bool) -> Gpu:
    name = _text(_ask(nvml, "nvmlDeviceGetName", handle)) or "unknown NVIDIA GPU"
    memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    parent = _ask(nvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle) if mig else handle
    capability = _ask(nvml, "nvmlDeviceGetCudaComputeCapability", parent)
    facts = {} if mig else find_facts(name) or {}  # an instance has a part of the card's speed
    return Gpu(
        index=index,
        name=name,
        uuid=_text(_ask(nvml, "nvmlDeviceGetUUID", handle)),
        total_bytes=memory.total if memory else None,
        free_bytes=memory.free if memory else None,
        compute_capability=tuple(capability) if capability else None,  # type: ignore[arg-type]
        mig=mig,
        link=_link(nvml, parent),
        processes=tuple(_processes(nvml, handle)),
        **_speed(facts),
    )


def _speed(facts: dict[str, Any]) -> dict[str, Any]:
    return {"tflops": facts.get("bf16_tflops") or facts.get("fp16_tflops"), "bandwidth_gb_s": facts.get("bandwidth_gb_s")}


def link_speed(link: str | None, compute_capability: tuple[int, int] | None) -> float | None:
    """`link_speed("PCIe 4.0 x 16", None)` is 32: 10^9 bytes a second one way."""
    match = re.fullmatch(r"(NVLink|PCIe (\d+)\.0) x (\d+)", link or "")
    if match is None:
        return None
    if match[2]:
        one = _file()["links"]["pcie_lane_gb_s"].get(match[2])
    else:
        one = _file()["links"]["nvlink_gb_s"].get(".".join(map(str, compute_capability or ())))
    return int(match[3]) * one if one else None


def _link(nvml: Any, handle: Any) -> str | None:
    """The fastest way to another GPU that this one has: "NVLink x 18" or "PCIe 4.0 x 16"."""
    active = sum(_ask(nvml, "nvmlDeviceGetNvLinkState", handle, link) == 1 for link in range(MOST_NVLINKS))
    if active:
        return f"NVLink x {active}"
    generation = _ask(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle)
    width = _ask(nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle)
    return f"PCIe {generation}.0 x {width}" if generation and width else None


def _processes(nvml: Any, handle: Any) -> Iterator[GpuProcess]:
    import psutil

    seen = set()
    for kind in ("Compute", "Graphics"):
        for process in _ask(nvml, f"nvmlDeviceGet{kind}RunningProcesses", handle) or []:
            if process.pid in seen or process.pid == os.getpid():
                continue
            seen.add(process.pid)
            try:
                name = psutil.Process(process.pid).name()
            except psutil.Error:
                name = None  # of another container
            yield GpuProcess(process.pid, name, process.usedGpuMemory)


def model_words(name: str) -> frozenset[str]:
    """`model_words("NVIDIA GeForce RTX 4070 Ti")` is {"4070", "ti"}: what tells this model from another."""
    text = re.sub(r"(rtx|gtx|geforce|quadro|tesla)(?=[a-z]?\d)", r"\1 ", name.lower())
    text = re.sub(r"(?<=\d)(ti|super)\b", r" \1", re.sub(r"(\d+)\s+gb\b", r"\1gb", text))
    return frozenset(re.findall(r"[a-z0-9]+", text)) - NOISE


@functools.cache
def _file() -> dict[str, Any]:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where libyaml is there
    try:
        return yaml.load(FACTS_FILE.read_text(encoding="utf-8"), Loader=loader)  # noqa: S506 - both are safe
    except OSError as error:
        raise ConfigError(
            f"{FACTS_FILE} cannot be read ({error.strerror}); run sft-play from a clone of its repository"
        ) from None


@functools.cache
def _facts() -> dict[frozenset[str], dict[str, Any]]:
    return {model_words(name): entry for entry in _file()["gpus"] for name in (entry["name"], *entry.get("aliases", ()))}


def find_facts(name: str) -> dict[str, Any] | None:
    """The entry of configs/hardware.yaml for a device string or a name that people use; None if there is none.

    Whole words must agree, so "NVIDIA RTX A1000" is not taken for an A100. A size such as "24GB" may follow if it is right.
    """
    words = model_words(name)
    sizes = {word for word in words if re.fullmatch(r"\d+gb", word)}
    entry = _facts().get(words)
    if entry is None and len(sizes) == 1 and (bare := _facts().get(words - sizes)) and bare["memory_mib"]:
        gib = int(next(iter(sizes)).removesuffix("gb"))
        entry = bare if round(bare["memory_mib"] / 1024) in (gib, gib - 1) else None
    return entry


def what_if(name: str, count: int = 1) -> Machine:
    """A machine with `count` GPUs of a model that need not be here, all their memory free.

    Raises:
        ConfigError: the model is not known (names the nearest), its memory is not, or `count` is below 1.
    """
    if count < 1:
        raise ConfigError(f"{count} GPUs: expected a whole number above 0, e.g. NGPU=2")
    facts = find_facts(name)
    if facts is None:
        raise ConfigError(f'GPU="{name}" is not known; nearest: {", ".join(nearest_names(name))}. All names: {FACTS_FILE}')
    if facts["memory_mib"] is None:
        raise ConfigError(f'GPU="{name}": what its driver reports as memory is not recorded; add memory_mib in {FACTS_FILE}')
    major, minor = facts["compute_capability"].split(".")
    memory = facts["memory_mib"] * MIB
    gpus = tuple(
        Gpu(
            index=index,
            name=facts["name"],
            total_bytes=memory,
            free_bytes=memory,
            compute_capability=(int(major), int(minor)),
            link=facts.get("link"),
            **_speed(facts),
        )
        for index in range(count)
    )
    return Machine(gpus=gpus, note="", host=detect_host(), what_if=True)


def nearest_names(name: str, limit: int = 4) -> list[str]:
    """Known GPUs whose names resemble `name`: those that share a word first."""
    names = list(dict.fromkeys(entry["name"] for entry in _facts().values()))
    wanted = " ".join(sorted(model_words(name)))

    def likeness(known: str) -> tuple[int, float]:
        words = model_words(known)
        ratio = difflib.SequenceMatcher(None, wanted, " ".join(sorted(words))).ratio()
        return len(words & model_words(name)), ratio

    return sorted(names, key=likeness, reverse=True)[:limit]


def to_json(machine: Machine) -> dict[str, Any]:
    """What `sft-play gpu-info --json` prints."""
    values = asdict(machine)
    for gpu, entry in zip(machine.gpus, values["gpus"], strict=True):
        entry.update(bf16=gpu.bf16, fp16=gpu.fp16)
    return values


def _or_na(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "n/a" if value is None else str(value)


def memory_text(free: int | None, total: int | None) -> str:
    """`memory_text(5 * GIB, 24 * GIB)` is "5.00 GiB free of 24.00 GiB"."""
    free_text, total_text = (format_bytes(value) if value is not None else "n/a" for value in (free, total))
    return f"{free_text} free of {total_text}"


def process_text(process: GpuProcess) -> str:
    """Who holds how much: "4021 python 3.10 GiB"."""
    size = format_bytes(process.used_bytes) if process.used_bytes is not None else "n/a"
    return f"{process.pid} {process.name or 'n/a'} {size}"


def gpu_info_table(machine: Machine) -> "RenderableType":
    """What `make gpu-info` shows a person."""
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    host = machine.host
    parts: list[Any] = []
    if machine.gpus:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for heading in ("", "GPU", "memory", "compute", "bf16", "fp16", "link", "used by"):
            table.add_column(heading, overflow="fold")
        for gpu in machine.gpus:
            capability = ".".join(map(str, gpu.compute_capability)) if gpu.compute_capability else "n/a"
            users = "\n".join(escape(process_text(process)) for process in gpu.processes) or "nobody"
            table.add_row(
                str(gpu.index),
                gpu.name + (" (MIG)" if gpu.mig else ""),
                memory_text(gpu.free_bytes, gpu.total_bytes),
                capability,
                _or_na(gpu.bf16),
                _or_na(gpu.fp16),
                _or_na(gpu.link),
                users,
            )
        parts += [table, f"driver {_or_na(machine.driver)}, CUDA up to {_or_na(machine.cuda)}"]
    else:
        parts.append("[bold]No GPU[/]: training runs on the CPU")
    if machine.note:
        parts.append(f"[yellow]{escape(machine.note)}[/]")
    parts.append(f"CPU: {_or_na(host.cpu_model)}, {host.cpu_cores} cores usable, bf16 instructions: {_or_na(host.cpu_bf16)}")
    parts.append(f"RAM: {memory_text(host.ram_free_bytes, host.ram_total_bytes)}{host.ram_limit_text}")
    return Group(*parts)
