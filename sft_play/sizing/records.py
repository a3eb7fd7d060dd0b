"""What real steps measured, kept so that the next prediction of the same kind of step is corrected by it."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sft_play.config.schema import RunConfig
from sft_play.runlog import cache_dir
from sft_play.sizing.planner import Memory, Plan
from sft_play.sizing.search import Estimator

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "deepspeed")
WORTH_A_WORD = 0.005  # a correction below half a percent is not mentioned
LOAD = "load"

Ratios = Mapping[str, float]  # phase -> measured / predicted of what lies above the weights


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What a probe measured, over all ranks the highest."""

    phases: dict[str, int] = field(default_factory=dict)  # peak bytes; empty where they could not be measured
    reserved_bytes: int | None = None
    overhead_bytes: int | None = None  # of a GPU, beside the allocator's: context, kernels, communicator
    step_seconds: float | None = None  # of an optimizer step at the largest batch
    batch_share: float = 1.0  # tokens of the measured batch, of those that the plan allows for
    ran_out: bool = False  # memory ran out, or the device was full and cached blocks had to be given back

    @property
    def peak_bytes(self) -> int | None:
        """The highest phase."""
        return max(self.phases.values(), default=None)

    def fits(self, plan: Plan) -> bool:
        """Whether the plan may be run: memory did not run out, and the peak is within the budget."""
        within = plan.memory is None or self.peak_bytes is None or self.peak_bytes <= plan.memory.budget_bytes
        return within and not self.ran_out

    @classmethod
    def of_all(cls, ranks: list["Proof"]) -> "Proof":
        """The highest of every number; a phase counts if each rank measured it."""
        shared = set.intersection(*(set(proof.phases) for proof in ranks))

        def highest(name: str) -> Any:
            return max((value for proof in ranks if (value := getattr(proof, name)) is not None), default=None)

        return cls(
            phases={phase: max(proof.phases[phase] for proof in ranks) for phase in ranks[0].phases if phase in shared},
            reserved_bytes=highest("reserved_bytes"),
            overhead_bytes=highest("overhead_bytes"),
            step_seconds=highest("step_seconds"),
            batch_share=highest("batch_share"),
            ran_out=any(proof.ran_out for proof in ranks),
        )


def installed_versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Of the packages that are installed; default those that memory depends on."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def record_path(architecture: str, device: str, config: RunConfig, plan: Plan, folder: Path | None = None) -> Path:
    """Where the corrections of this kind of step lie: the same GPU, versions, model and settings, whatever the micro-batch.

    Args:
        architecture: the model's config as JSON.
        device: its name.
        config: the run.
        plan: how it is carried out.
        folder: of all records; default in the project's cache.
    """
    kind = replace(
        plan, micro_batch_size=0, gradient_accumulation_steps=0, effective_batch_size=0, learning_rate=0.0,
        steps_per_epoch=0, total_steps=0, memory=None, why=(), alternatives=(),
    )  # fmt: skip
    parts = [architecture, device, config.tuning.model_dump_json(), config.train.optimizer, str(config.eval.batch_size)]
    text = "\n".join([*parts, json.dumps(asdict(kind)), json.dumps(installed_versions())])
    return (folder or cache_dir() / "probes") / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def read_ratios(path: Path) -> dict[str, float]:
    """The corrections of an earlier probe; none if there is no record, or none that can be read."""
    try:
        ratios = json.loads(path.read_text(encoding="utf-8"))["ratios"]
        return {phase: float(ratio) for phase, ratio in ratios.items() if 0 < float(ratio) < 100}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def ratios_of(predicted: Memory, measured: Mapping[str, int], earlier: Ratios) -> dict[str, float]:
    """Measured over predicted of each phase above the weights; `earlier` is what the prediction was corrected by already."""
    weights = predicted.phases.get(LOAD, 0)
    return {
        phase: (size - weights) / (predicted.phases[phase] - weights) * earlier.get(phase, 1.0)
        for phase, size in measured.items()
        if phase != LOAD and size > weights and predicted.phases.get(phase, 0) > weights
    }


def write_record(path: Path, plan: Plan, proof: Proof, device: str) -> None:
    """Keeps what was measured beside what was predicted, where both exist, in the file that `record_path` names.

    A batch that was smaller than the plan allows only ever corrects upwards.
    """
    if plan.memory is None or not proof.phases:
        return
    ratios = ratios_of(plan.memory, proof.phases, read_ratios(path))
    ratios = ratios if proof.batch_share >= 1 else {phase: max(ratio, 1.0) for phase, ratio in ratios.items()}
    record: dict[str, Any] = {
        "device": device,
        "versions": installed_versions(),
        "micro_batch_size": plan.micro_batch_size,
        "predicted": plan.memory.phases,
        "measured": proof.phases,
        "reserved_bytes": proof.reserved_bytes,
        "ratios": ratios,
    }
    _write(path, record)


def _write(path: Path, record: dict[str, Any]) -> None:
    """The file is there whole or not at all; a run does not end because it could not be written."""
    partial = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(record, indent=1), encoding="utf-8")
        partial.replace(path)


def _overhead_path(device: str, world_size: int) -> Path:
    text = f"{device} {'several' if world_size > 1 else 'one'} {json.dumps(installed_versions())}"
    return cache_dir() / "probes" / f"overhead-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def write_overhead(device: str, world_size: int, size: int) -> None:
    """Keeps what a process took of this GPU beside its tensors; the highest that was seen counts."""
    earlier = read_overhead(device, world_size) or 0
    _write(_overhead_path(device, world_size), {"device": device, "overhead_bytes": max(size, earlier)})


def read_overhead(device: str, world_size: int) -> int | None:
    """Context, kernels and communicator in bytes, as an earlier probe on this kind of GPU measured them."""
    try:
        size = json.loads(_overhead_path(device, world_size).read_text(encoding="utf-8"))["overhead_bytes"]
        return size if isinstance(size, int) and size > 0 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def corrected(memory: Memory, ratios: Ratios) -> Memory:
    """The prediction with each phase's part above the weights stretched; what that adds to the peak counts as temporaries."""
    if not ratios:
        return memory
    weights = memory.phases.get(LOAD, 0)
    phases = {
        phase: size if phase not in ratios else weights + round((size - weights) * ratios[phase])
        for phase, size in memory.phases.items()
    }
    top = max(phases, key=lambda phase: phases[phase])
    terms = dict(memory.terms)
    terms["temporaries"] = terms.get("temporaries", 0) + phases[top] - memory.peak_bytes
    reserved = memory.reserved_bytes
    return replace(
        memory,
        phases=phases,
        peak_phase=top,
        peak_bytes=phases[top],
        terms=terms,
        reserved_bytes=None if reserved is None else reserved + phases[top] - memory.peak_bytes,
    )


def corrected_estimator(estimate: Estimator, path_of: Callable[[RunConfig, Plan], Path]) -> Estimator:
    """The estimator with what earlier probes measured; `path_of` names the record of a plan's kind."""
    known: dict[Path, dict[str, float]] = {}

    def estimate_corrected(config: RunConfig, plan: Plan) -> Memory:
        path = path_of(config, plan)
        if path not in known:
            known[path] = read_ratios(path)
        return corrected(estimate(config, plan), known[path])

    return estimate_corrected


def correction_sentence(ratios: Ratios, phase: str) -> list[str]:
    """What an earlier probe changed, for the reasons of a plan; empty if it is not worth a word."""
    ratio = ratios.get(phase, 1.0)
    if abs(ratio - 1) < WORTH_A_WORD:
        return []
    return [f"the prediction is corrected by an earlier probe of this kind of step: x {ratio:.3f} above the weights"]
