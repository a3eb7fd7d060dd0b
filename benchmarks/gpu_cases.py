"""What make bench-sizing-gpu measures: real steps of full-size models, and plans for budgets that somebody could have."""

import random
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from benchmarks.geometries import MEASURED
from benchmarks.small_models import WIDE, small_config
from sft_play.config.schema import DataConfig, LoraSettings, ModelConfig, RunConfig, TrainConfig, TuningConfig
from sft_play.model import choose_attention
from sft_play.sizing import memory
from sft_play.sizing.estimator import estimator
from sft_play.sizing.guard import guard
from sft_play.sizing.planner import Device, Plan, draft_plans
from sft_play.sizing.recordings import shared_recordings
from sft_play.sizing.search import choose_plan
from sft_play.sizing.step import StepSpec

MODES = ("full", "lora", "qlora")
TOO_LARGE = {("Llama-3.1-8B", "full")}  # 18 bytes a parameter are more than any single GPU of today has
# Rows and tokens of a row of a micro-batch, and whether it is packed
SHAPES = ((4, 512, False), (8, 1024, True), (2, 2048, False), (2, 4096, True), (1, 8192, False), (1, 512, False))
SHAPES_EACH = 2  # of them for each model and mode, with checkpointing and without
PLANNED_ROWS = 5040  # per optimizer step: every micro-batch up to ten divides it, and many above
PLANNED_TOKENS = {"small": (2048, 4096, 8192, 16384), "large": (2048, 4096, 8192)}  # of a micro-batch, about
LARGE_FROM = "Llama-3.2-3B"


@dataclass(frozen=True)
class Target:
    """The device that steps are planned and predicted for."""

    kind: str  # cuda or cpu
    name: str
    compute_capability: tuple[int, int] | None = None

    @property
    def budget(self) -> memory.DeviceBudget:
        """Its fixed costs, with no limit."""
        return memory.device_budget(self.kind, 2**50, compute_capability=self.compute_capability)


@dataclass(frozen=True)
class Case:
    """A real step."""

    key: str  # names it in the file of lines
    model: str
    spec: StepSpec
    budget_bytes: int | None = None  # what its plan was made for
    allowed_bytes: int | None = None  # what the allocator may take: the budget and the guard
    memory_is_limit: bool = False  # whether the plan would have had a larger micro-batch with more memory


def architecture(model: str) -> PretrainedConfig:
    """The config of a full-size geometry, or of a small one ("small-llama")."""
    return small_config(model.removeprefix("small-"), WIDE) if model.startswith("small-") else MEASURED[model]


def spec_to_json(spec: StepSpec) -> dict[str, Any]:
    """All that is needed to predict the step again."""
    return asdict(replace(spec, lora=None)) | {"lora": spec.lora.model_dump()}  # type: ignore[arg-type]


def spec_from_json(tree: dict[str, Any]) -> StepSpec:
    """The inverse of `spec_to_json`."""
    return StepSpec(**tree | {"lora": LoraSettings(**tree["lora"])})


def _types(mode: str, target: Target) -> dict[str, str]:
    """Types as the planner chooses them when it may: fp32 master weights for full fine-tuning, 16 bit under adapters."""
    if target.kind == "cpu":
        return dict(dtype="float32", mixed_precision="no")
    return dict(dtype="float32" if mode == "full" else "bfloat16", mixed_precision="bf16")


def measured_cases(target: Target, quick: bool) -> list[Case]:
    """The grid, ordered so that any first part of it has all models and modes: one step of each, then the next of each."""
    models = ("small-llama", "small-qwen3") if quick else tuple(MEASURED)
    shapes = ((2, 64, False), (3, 32, True)) if quick else SHAPES
    groups = []
    for (m, model), (n, mode) in product(enumerate(models), enumerate(MODES)):
        if (model, mode) not in TOO_LARGE:
            chosen = [shapes[(m + 2 * n + k) % len(shapes)] for k in range(2 if quick else 2 * SHAPES_EACH)]
            groups.append([_measured(model, mode, shape, k % 2 == 1, target) for k, shape in enumerate(chosen)])
    return [case for row in zip_longest(*groups) for case in row if case is not None]


def _measured(model: str, mode: str, shape: tuple[int, int, bool], checkpointing: bool, target: Target) -> Case:
    rows, row_tokens, packing = shape
    spec = StepSpec(
        mode=mode,
        lora=LoraSettings(r=16),
        attention=choose_attention("auto", architecture(model), target.kind),
        gradient_checkpointing=checkpointing,
        packing=packing,
        rows=rows,
        row_tokens=row_tokens,
        device=target.kind,
        **_types(mode, target),
    )
    kind = f"{'recomputed' if checkpointing else 'kept'} {rows}x{row_tokens} {'packed' if packing else 'padded'}"
    return Case(f"{model} {mode} {kind}", model, spec)


def planned_groups(target: Target, quick: bool) -> Iterator[tuple[str, str, int, bool, Target, bool]]:
    """Arguments for `planned_cases`: model, mode, tokens of a row, packing, and the target."""
    models = ("small-llama",) if quick else tuple(MEASURED)
    lengths = (32, 64) if quick else (512, 1024)
    for index, (model, mode) in enumerate(product(models, MODES)):
        if (model, mode) not in TOO_LARGE:
            yield model, mode, lengths[index % 2], index % 4 > 1, target, quick


def planned_cases(model: str, mode: str, row_tokens: int, packing: bool, target: Target, quick: bool) -> list[Case]:
    """Plans for a model, each for a budget drawn between what one micro-batch and the next larger one need.

    The planner is asked for the largest micro-batch that fits, not for the fastest plan, so that memory is the limit.
    """
    architecture_, unit = architecture(model), row_tokens if packing else 1
    config = RunConfig(
        model=ModelConfig(name=model),
        data=DataConfig(train_path="none"),
        tuning=TuningConfig(mode=mode, lora=LoraSettings(r=16)),
        train=TrainConfig(effective_batch_size=PLANNED_ROWS * unit, packing=packing),
    )
    drafts = draft_plans(
        config,
        device=Device(target.kind, target.name, bf16=target.kind == "cuda"),
        world_size=1,
        rows=PLANNED_ROWS,
        max_seq_len=row_tokens,
        attention=choose_attention("auto", architecture_, target.kind),
    )
    recomputing = [draft for draft in drafts if draft.gradient_checkpointing]
    models = list(MEASURED)
    large = not quick and models.index(model) >= models.index(LARGE_FROM)
    tokens = (128, 256) if quick else PLANNED_TOKENS["large" if large else "small"]
    draw = random.Random(f"{model} {mode}")
    cases = []
    with tempfile.TemporaryDirectory() as cache:  # nothing that was predicted for another budget
        for about in tokens:
            least = next(i for i, draft in enumerate(recomputing) if draft.rows_per_micro_batch * row_tokens >= about)
            low, high = (_needed(model, StepSpec.of(config, recomputing[i]), target) for i in (least, least + 1))
            budget = round(low + draw.random() * (high - low))
            limited = replace(target.budget, budget_bytes=budget)
            plan = choose_plan(config, drafts, estimator(architecture_, limited, 1.0, cache=Path(cache)), _largest)
            cases.append(_planned(model, mode, target, config, plan, drafts, budget))
    return cases


def _needed(model: str, spec: StepSpec, target: Target) -> int:
    """What a device must have free for the step."""
    predicted = predict(model, spec, target)
    return predicted["reserved"] or max(predicted["phases"].values())


def _largest(config: RunConfig, plan: Plan) -> float:
    """A clock for which larger micro-batches are faster in proportion."""
    return 1 / plan.micro_batch_size


def _planned(model: str, mode: str, target: Target, config: RunConfig, plan: Plan, drafts: list[Plan], budget: int) -> Case:
    words = f"{plan.micro_batch_size} {'tokens packed' if plan.packing else f'rows of {plan.max_seq_len}'}"
    return Case(
        key=f"planned {model} {mode} {budget / 2**30:.2f} GiB: {words}",
        model=model,
        spec=StepSpec.of(config, plan),
        budget_bytes=budget,
        allowed_bytes=budget + guard(target.kind, budget).bytes,
        memory_is_limit=plan.micro_batch_size < max(draft.micro_batch_size for draft in drafts),
    )


def predict(model: str, spec: StepSpec, target: Target) -> dict[str, Any]:
    """Bytes by phase, the peak, and what the allocator takes for it; fixed costs included."""
    step = shared_recordings(architecture(model)).step(spec)
    found = memory.estimate(step, target.budget)
    layered = step.peaks(target.budget.granularity, in_layers=True)
    return {
        "weights": sum(step.peaks(target.budget.granularity)["forward"].terms[name] for name in ("weights", "adapters")),
        "phases": {phase: size for phase, size in found.phases.items() if phase != "load"},
        "in_layers": {p: peak.bytes + target.budget.workspace_bytes for p, peak in layered.items() if p != "load"},
        "reserved": memory.reserved_bytes(step, found.peak_bytes) if target.kind == "cuda" else None,
    }
