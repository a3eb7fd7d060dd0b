"""GPU specifications from configs/hardware.yaml, looked up by the names that drivers and people use."""

import difflib
import functools
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from sft_play.errors import ConfigError
from sft_play.resources import CONFIGS

SPECS_FILE = CONFIGS / "hardware.yaml"

LARGEST_MACHINE = 8  # GPUs; more are on several machines

# Words of the vendor or product line that do not identify the model.
GENERIC_WORDS = {
    "nvidia", "geforce", "tesla", "rtx", "generation", "edition", "graphics", "gpu", "card", "tensor", "core"
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Specs:
    """A model of GPU, as configs/hardware.yaml has it, which says what the fields mean; None is unknown."""

    name: str
    memory_mib: int | None
    compute_capability: str
    bf16_tflops: float | None = None
    fp16_tflops: float | None = None
    matmul_tflops: float | None = None
    bandwidth_gb_s: float | None = None
    link: str | None = None
    bridge: str | None = None
    host_link: str | None = None
    network_gb_s: float | None = None


def model_words(name: str) -> frozenset[str]:
    """The words that identify a model: `model_words("NVIDIA GeForce RTX 4070 Ti")` is {"4070", "ti"}."""
    text = re.sub(r"(rtx|gtx|geforce|quadro|tesla)(?=[a-z]?\d)", r"\1 ", name.lower())
    text = re.sub(r"(?<=\d)(ti|super)\b", r" \1", re.sub(r"(\d+)\s+gb\b", r"\1gb", text))
    return frozenset(re.findall(r"[a-z0-9]+", text)) - GENERIC_WORDS


@functools.cache
def read_shipped(file: Path) -> dict[str, Any]:
    """The content of a YAML file that comes with SFT-Play; raises a ConfigError if it cannot be read."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster if libyaml is available
    try:
        return yaml.load(file.read_text(encoding="utf-8"), Loader=loader)  # noqa: S506 - both are safe
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}); install SFT-Play again") from None


@functools.cache
def _specs() -> dict[frozenset[str], Specs]:
    specs, known = {}, {field.name for field in fields(Specs)}
    for entry in read_shipped(SPECS_FILE)["gpus"]:
        found = Specs(**{key: value for key, value in entry.items() if key in known})
        for name in (found.name, *entry.get("aliases", ())):
            specs[model_words(name)] = found
    return specs


def find_specs(name: str) -> Specs | None:
    """What configs/hardware.yaml has for a driver's device string or a common name, or None.

    Whole words must match, so "NVIDIA RTX A1000" is not taken for an A100. A size such as "24GB" may follow
    if it is correct.
    """
    words = model_words(name)
    sizes = {word for word in words if re.fullmatch(r"\d+gb", word)}
    entry = _specs().get(words)
    if entry is None and len(sizes) == 1 and (bare := _specs().get(words - sizes)) and bare.memory_mib:
        gib = int(next(iter(sizes)).removesuffix("gb"))
        entry = bare if round(bare.memory_mib / 1024) in (gib, gib - 1) else None
    return entry


def known_gpus() -> list[str]:
    """The GPUs that can be planned for: those whose memory is known, by the names that drivers report."""
    return [entry["name"] for entry in read_shipped(SPECS_FILE)["gpus"] if entry["memory_mib"]]


def link_speed(link: str | None, compute_capability: tuple[int, int] | None) -> float | None:
    """GB/s in one direction: `link_speed("PCIe 4.0 x 16", None)` is 32."""
    match = re.fullmatch(r"(NVLink|PCIe (\d+)\.0) x (\d+)", link or "")
    if match is None:
        return None
    known = read_shipped(SPECS_FILE)["links"]
    if match[2]:
        per_lane = known["pcie_lane_gb_s"].get(match[2])
    else:
        per_lane = known["nvlink_gb_s"].get(".".join(map(str, compute_capability or ())))
    return per_lane and int(match[3]) * per_lane


def generation_of_pcie(compute_capability: tuple[int, int] | None) -> int | None:
    """The generation of PCIe that GPUs of a compute capability have: 4 of (8, 9)."""
    known = read_shipped(SPECS_FILE)["links"]["pcie_generation"]
    return known.get(".".join(map(str, compute_capability or ())))


def nearest_names(name: str, limit: int = 4) -> list[str]:
    """Known GPUs with similar names, those that share a word with `name` first."""
    wanted = model_words(name)

    def similarity(known: str) -> tuple[int, float]:
        words = model_words(known)
        pair = " ".join(sorted(wanted)), " ".join(sorted(words))
        return len(words & wanted), difflib.SequenceMatcher(None, *pair).ratio()

    names = dict.fromkeys(specs.name for specs in _specs().values())
    return sorted(names, key=similarity, reverse=True)[:limit]
