"""Results that survive being cut off: one JSON line for each measurement, kept beside the results until all are done."""

import json
import platform
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sft_play.sizing.records import installed_versions

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "trl", "peft", "bitsandbytes", "accelerate", "flash-attn")


def versions() -> dict[str, str]:
    """Of Python and what the numbers hang on; what is not installed is left out."""
    return {"python": platform.python_version(), **installed_versions(PACKAGES)}


def made_on(device: torch.device) -> dict[str, Any]:
    """The hardware, in words."""
    if device.type == "cpu":
        return {"device": "cpu", "cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    from sft_play.hardware import detect

    properties = torch.cuda.get_device_properties(device)
    return {
        "device": "cuda",
        "gpu": properties.name,
        "total_bytes": properties.total_memory,
        "compute_capability": [properties.major, properties.minor],
        "driver": detect().driver,
        "cuda": torch.version.cuda,
    }


class Lines:
    """A file with one measurement a line. Lines of another machine or other versions do not count."""

    def __init__(self, path: Path, device: torch.device):
        self.path = path
        self.made = {"made_on": made_on(device), "versions": versions()}

    def read(self) -> list[dict[str, Any]]:
        """The measurements so far; a line that was cut off while it was written is left out."""
        if not self.path.exists():
            return []
        return [line for line in self._parsed() if line.pop("made") == self.made]

    def _parsed(self) -> Iterator[dict[str, Any]]:
        for text in self.path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(text)
            except json.JSONDecodeError:
                warnings.warn(f"{self.path}: a line that is no JSON is left out", stacklevel=2)

    def add(self, line: dict[str, Any]) -> None:
        """Appends a measurement; it is on disk when this returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line | {"made": self.made}) + "\n")


def write_result(path: Path, record: dict[str, Any], rows: dict[str, list[dict[str, Any]]]) -> None:
    """A result file that a person can read: the record indented, each list of `rows` one row a line."""
    text = json.dumps(record, indent=1).removesuffix("\n}")
    for name, entries in rows.items():
        lines = ",\n".join("  " + json.dumps(entry) for entry in entries)
        text += f',\n "{name}": [\n{lines}\n ]' if entries else f',\n "{name}": []'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n}}\n", encoding="utf-8")
