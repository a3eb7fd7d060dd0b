"""Measurements that survive an interruption: one JSON line each, appended until all are done."""

import json
import platform
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sft_play.fingerprints import installed_versions
from sft_play.machine.gpus import detect

RESULTS = Path(__file__).parent / "results"
KERNELS = ("triton", "liger-kernel", "kernels", "flash-attn", "torchao")  # packages that bring some
PACKAGES = ("torch", "transformers", "trl", "peft", "bitsandbytes", "accelerate", *KERNELS)


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that affect the numbers."""
    return {"python": platform.python_version(), **installed_versions(PACKAGES)}


def made_on(device: torch.device) -> dict[str, Any]:
    """A description of the hardware, by the driver: torch would take memory of the GPU to tell."""
    if device.type == "cpu":
        return {
            "device": "cpu",
            "cpu": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
        }
    machine = detect()
    gpu = machine.gpus[device.index or 0]
    return {
        "device": "cuda",
        "gpu": gpu.name,
        "total_bytes": gpu.total_bytes,
        "compute_capability": list(gpu.compute_capability or ()),
        "driver": machine.driver,
        "cuda": torch.version.cuda,
    }


class MeasurementLog:
    """A file with one measurement per line; lines from other hardware or other versions are ignored."""

    def __init__(self, path: Path, device: torch.device):
        self.path = path
        self.made = {"made_on": made_on(device), "versions": versions()}

    def read(self) -> list[dict[str, Any]]:
        """The measurements so far; a truncated line is left out."""
        if not self.path.exists():
            return []
        return [line for line in self._parsed() if line.pop("made") == self.made]

    def _parsed(self) -> Iterator[dict[str, Any]]:
        for text in self.path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(text)
            except json.JSONDecodeError:
                warnings.warn(f"{self.path}: skipped a line that is not valid JSON", stacklevel=2)

    def add(self, line: dict[str, Any]) -> None:
        """Appends a measurement and closes the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line | {"made": self.made}) + "\n")


def write_result(path: Path, record: dict[str, Any], rows: dict[str, list[dict[str, Any]]]) -> None:
    """Writes a readable result file: the record is indented, each list in `rows` has one row per line."""
    text = json.dumps(record, indent=1).removesuffix("\n}")
    for name, entries in rows.items():
        lines = ",\n".join("  " + json.dumps(entry) for entry in entries)
        text += f',\n "{name}": [\n{lines}\n ]' if entries else f',\n "{name}": []'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n}}\n", encoding="utf-8")
