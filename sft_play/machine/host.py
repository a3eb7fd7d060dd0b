"""CPU and RAM that this process may use: CPU affinity, cgroup v1 and v2 limits, /proc."""

import importlib.util
import math
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from sft_play.choices.optimizers import OPTIMIZERS
from sft_play.errors import ConfigError
from sft_play.extras import install_command
from sft_play.units import counted

if TYPE_CHECKING:
    from sft_play.config.schema import RunConfig

NO_LIMIT_FROM = 2**60  # cgroup v1 reports a huge number if there is no limit
MOST_COMPILERS = 32  # of a rank, PyTorch's own limit
MOST_THREADS = 1024  # of a process; OpenMP crashes where it cannot start as many as it is asked for


@dataclass(frozen=True)
class Host:
    """CPU and RAM; None if unknown."""

    cpu_model: str | None
    cpu_cores: int
    cpu_bf16: bool | None  # whether the CPU has bf16 instructions (AVX-512, AMX or ARM)
    ram_total_bytes: int | None
    ram_free_bytes: int | None
    ram_limited: bool  # whether a cgroup (container or job) limits the RAM to less than the machine has

    @property
    def ram_limit_text(self) -> str:
        """A note on the RAM size if a cgroup limits it."""
        return " (limit of this container or job)" if self.ram_limited else ""


def detect_host(root: Path = Path("/")) -> Host:
    """Detects CPU and RAM; `root` is the folder that contains /proc and /sys."""
    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    limits = list(_memory_limits(root))
    for limit, left in limits:
        total, free = min(total, limit), min(free, left)
    model, flags = cpu_info(root)
    return Host(
        cpu_model=model,
        cpu_cores=usable_cores(root),
        cpu_bf16=bool(flags & {"avx512_bf16", "amx_bf16", "bf16"}) if flags else None,
        ram_total_bytes=total,
        ram_free_bytes=max(0, free),
        ram_limited=total < memory.total,
    )


def asked_threads(environment: Mapping[str, str] = os.environ) -> int | None:
    """The threads that OMP_NUM_THREADS gives each process; None if it is no number, which OpenMP ignores.

    Raises:
        ConfigError: it is more than MOST_THREADS.
    """
    text = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # the rest is for nested ones
    if not re.fullmatch(r"[0-9]+", text):
        return None
    if len(text.lstrip("0")) > len(str(MOST_THREADS)) or int(text) > MOST_THREADS:
        raise ConfigError(
            f"OMP_NUM_THREADS={text[:20]}: expected at most {MOST_THREADS:,} threads a process; this machine "
            f"has {counted(usable_cores(), 'usable core')}. Unset it, and the processes share the cores"
        )
    return int(text) or None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text and re.fullmatch(r"-?\d+", text) else None


def _counter(path: Path, name: str) -> int:
    """The number behind a name in a file of such lines; 0 if it is not there."""
    found = re.search(rf"^{name} (\d+)$", _read(path) or "", re.MULTILINE)
    return int(found.group(1)) if found else 0


def cpu_info(root: Path = Path("/")) -> tuple[str | None, set[str]]:
    """The model of the CPU, None if unknown, and what it can do, by the names of /proc/cpuinfo."""
    text = _read(root / "proc/cpuinfo") or ""
    model = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    return model and model.group(1).strip(), set(flags.group(1).split()) if flags else set()


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """The folders of this process's cgroup and of its ancestors, each with the cgroup version (1 or 2)."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        version, base = 1 if controllers else 2, root / "sys/fs/cgroup"
        top = base
        if version == 1:
            mounts = (base / controllers, base / controller)
            top = next((mount for mount in mounts if mount.is_dir()), base)
        folder = top / path.strip("/")
        if not folder.is_dir():
            # in a container, its own group is mounted as the top, but the path is that of the host
            folder = top
        while True:
            yield folder, version
            if folder == top or top not in folder.parents:
                break
            folder = folder.parent


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, remaining bytes) of each group that has a limit; reclaimable page cache counts as remaining."""
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }
    for folder, version in _groups(root, "memory"):
        limit_name, usage_name, cache_name = names[version]
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        if limit is None or usage is None or limit >= NO_LIMIT_FROM:
            continue
        yield limit, limit - max(0, usage - _counter(folder / "memory.stat", cache_name))


def oom_kills(root: Path = Path("/")) -> int:
    """Processes that the kernel has killed for lack of memory since it booted; 0 if it does not say."""
    return _counter(root / "proc/vmstat", "oom_kill")


def own_ram_bytes() -> int:
    """RAM of this process alone; where the system says so, without mapped files, which can be dropped."""
    memory = psutil.Process().memory_info()
    return memory.rss - getattr(memory, "shared", 0)


def compilers_of(cores: int, ranks: int) -> int:
    """Processes in which each rank of a machine compiles; PyTorch alone would start one for each core."""
    return max(1, min(MOST_COMPILERS, cores // ranks))


def usable_cores(root: Path = Path("/")) -> int:
    """The cores that this process may use: those it is bound to, within the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder, version in _groups(root, "cpu"):
        quota: int | None
        if version == 1:
            quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us") or 1
        else:
            limit = re.fullmatch(r"(\d+) (\d+)", _read(folder / "cpu.max") or "")
            quota, period = (int(limit[1]), int(limit[2])) if limit else (None, 1)
        if quota and quota > 0:
            cores = min(cores, max(1, math.ceil(quota / period)))
    return cores


def free_bytes(folder: Path) -> int:
    """Free space on the disk of a folder; unlimited if the disk does not report its size."""
    usage = shutil.disk_usage(folder)
    return usage.free if usage.total else sys.maxsize


def existing_folder(path: Path) -> Path:
    """The path, or the nearest of its parents that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def missing(config: "RunConfig") -> dict[str, str]:
    """What the config needs and is not there, a sentence for each -> what to do about it."""
    found = missing_packages(config)
    path = config.parallel.nvme_path
    if path and (problem := _disk_problem(Path(path))):
        found[f"parallel.nvme_path={path} {problem}"] = "set it to a folder on a local disk"
    return found


def _disk_problem(folder: Path) -> str | None:
    """Why files in a folder cannot take what would be in RAM; None if they can."""
    if not folder.is_dir():
        return "is not a folder"
    if not os.access(folder, os.W_OK):
        return "is not writable"
    disks = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    around = (disks[each] for each in (folder.resolve(), *folder.resolve().parents) if each in disks)
    return "is in RAM itself" if next(around, "") in ("tmpfs", "ramfs") else None


def missing_packages(config: "RunConfig") -> dict[str, str]:
    """Which packages the config needs and are not installed, a sentence for each -> what to do about it."""
    from sft_play.engines.registry import engine_of  # not needed by `sft-play gpu-info`

    asked, optimizer = config.parallel.engine, OPTIMIZERS[config.train.optimizer]
    packages = engine_of(asked).packages if asked != "auto" else ()
    needs = {
        "tuning.mode=qlora": ("bitsandbytes", config.tuning.mode == "qlora"),
        f"train.optimizer={optimizer.name}": (optimizer.package or "", optimizer.package is not None),
    }
    needs |= {f"parallel.engine={asked}": (name, True) for name in packages}
    needs |= {f"train.report_to={name}": (name, True) for name in config.train.report_to}
    return {
        f"{key} needs {package}, which is not installed": f"run `{install_command(package)}`"
        for key, (package, needed) in needs.items()
        if needed and importlib.util.find_spec(package) is None
    }
