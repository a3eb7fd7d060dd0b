"""The cases of `make bench-sizing-gpu`: real steps of full-size models, and plans for random budgets."""

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, is_dataclass, replace
from itertools import product, zip_longest
from typing import Any

from transformers import PretrainedConfig

from benchmarks.geometries import MEASURED
from benchmarks.small_models import WIDE, small_config
from benchmarks.steps import flat, step_of
from sft_play.config.schema import DataConfig, LoraSettings, ModelConfig, RunConfig, TrainConfig, TuningConfig
from sft_play.model.attention.choice import choose_attention
from sft_play.plan import Device, Plan
from sft_play.planning.candidates.drafts import draft_plans
from sft_play.planning.search.choice import choose_plan
from sft_play.sizing.estimate.budget import DeviceBudget, device_budget, guard
from sft_play.sizing.estimate.estimator import estimator, shared_traces, with_births
from sft_play.sizing.estimate.memory import SizedStep, estimate
from sft_play.sizing.step import ASSUMED_CAPABILITY, Batch, JoinedRows, PaddedRows, StepSpec

MODES = ("full", "lora", "qlora")
TOO_LARGE = {("Llama-3.1-8B", "full")}  # needs 18 bytes per parameter, more than a single GPU has
# Rows of a micro-batch, tokens per row, and whether it is packed.
SHAPES = (
    (4, 512, False),
    (8, 1024, True),
    (2, 2048, False),
    (2, 4096, True),
    (1, 8192, False),
    (1, 512, False),
)
SHAPES_EACH = 2  # shapes for each model and mode, with checkpointing and without
PLANNED_ROWS = 5040  # per optimizer step: divisible by every micro-batch up to ten, and by many above
# Approximate tokens of planned micro-batches, by the size of the model.
PLANNED_TOKENS = {"small": (2048, 4096, 8192, 16384), "large": (2048, 4096, 8192)}
LARGE_FROM = "Llama-3.2-3B"


@dataclass(frozen=True)
class Target:
    """The device that steps are planned and predicted for."""

    kind: str  # "cuda" or "cpu"
    name: str
    compute_capability: tuple[int, int] | None = None

    @property
    def budget(self) -> DeviceBudget:
        """Its fixed costs, with no limit."""
        return device_budget(self.kind, 2**50, compute_capability=self.compute_capability)


@dataclass(frozen=True)
class Case:
    """A real step to measure."""

    key: str  # identifies it in the measurement log
    model: str
    spec: StepSpec
    budget_bytes: int | None = None  # the budget of the process that its plan was made for
    allowed_bytes: int | None = None  # limit of the allocator: budget and guard, without the context
    memory_is_limit: bool = False  # whether more memory would have allowed a larger micro-batch


def architecture(model: str) -> PretrainedConfig:
    """The config of a full-size geometry, or of a small one ("small-llama")."""
    return small_config(model.removeprefix("small-"), WIDE) if model.startswith("small-") else MEASURED[model]


def spec_to_json(spec: StepSpec) -> dict[str, Any]:
    """The step as JSON, complete enough to predict it again."""
    values = flat(spec) | {"lora": spec.lora.model_dump()}
    return {name: asdict(value) if is_dataclass(value) else value for name, value in values.items()}  # type: ignore[arg-type]


def spec_from_json(tree: dict[str, Any]) -> StepSpec:
    """The inverse of `spec_to_json`."""
    changes = {"lora": LoraSettings(**tree["lora"]), "compute_capability": tuple(tree["compute_capability"])}
    batches = {name: _batch(tree[name]) for name in ("batch", "eval_batch") if tree[name]}
    names = ("lengths", "eval_lengths", "fits", "eval_fits")  # no case has pictures
    lists = {name: tuple(tree.get(name, ())) for name in names}
    return step_of(**tree | changes | batches | lists | {"scratch": ()})  # of a CPU


def case_to_json(case: Case) -> dict[str, Any]:
    """The case as JSON, complete enough to measure it."""
    return asdict(case) | {"spec": spec_to_json(case.spec)}


def case_from_json(tree: dict[str, Any]) -> Case:
    """The inverse of `case_to_json`."""
    return Case(**tree | {"spec": spec_from_json(tree["spec"])})


def _batch(tree: dict[str, int]) -> Batch:
    return PaddedRows(**tree) if "rows" in tree else JoinedRows(**tree)


def _types(mode: str, target: Target) -> dict[str, str]:
    """The dtypes that the planner chooses: fp32 weights for full fine-tuning, 16 bit under adapters."""
    if target.kind == "cpu":
        return dict(dtype="float32", mixed_precision="no")
    return dict(dtype="float32" if mode == "full" else "bfloat16", mixed_precision="bf16")


def measured_cases(target: Target, quick: bool) -> list[Case]:
    """The grid, ordered so that any prefix covers many models and modes: one step of each, then the next."""
    models = ("small-qwen3",) if quick else tuple(MEASURED)
    shapes = ((2, 64, False), (3, 32, True)) if quick else SHAPES
    steps = 2 if quick else 2 * SHAPES_EACH
    groups = []
    for (m, model), (n, mode) in product(enumerate(models), enumerate(MODES)):
        if (model, mode) not in TOO_LARGE:
            chosen = [shapes[(m + 2 * n + k) % len(shapes)] for k in range(steps)]
            groups.append(
                [_measured(model, mode, shape, k % 2 == 1, target) for k, shape in enumerate(chosen)]
            )
    return [case for row in zip_longest(*groups) for case in row if case is not None]


def _measured(
    model: str, mode: str, shape: tuple[int, int, bool], checkpointing: bool, target: Target
) -> Case:
    rows, row_tokens, packing = shape
    spec = step_of(
        mode=mode,
        lora=LoraSettings(r=16),
        attention=choose_attention("auto", architecture(model), target.kind),
        activations="recompute" if checkpointing else "keep",
        batch=JoinedRows(rows * row_tokens) if packing else PaddedRows(rows, row_tokens),
        longest=row_tokens,
        device=target.kind,
        compute_capability=target.compute_capability or ASSUMED_CAPABILITY,
        **_types(mode, target),
    )
    activations, layout = "recomputed" if checkpointing else "stored", "packed" if packing else "padded"
    return Case(f"{model} {mode} {activations} {rows}x{row_tokens} {layout}", model, spec)


def planned_groups(target: Target, quick: bool) -> Iterator[tuple[str, str, int, bool, Target, bool]]:
    """Arguments for `planned_cases`: model, mode, tokens per row, packing, target, quick."""
    models = ("small-qwen3",) if quick else tuple(MEASURED)
    lengths = (32, 64) if quick else (512, 1024)
    for index, (model, mode) in enumerate(product(models, MODES)):
        if (model, mode) not in TOO_LARGE:
            yield model, mode, lengths[index % 2], index % 4 > 1, target, quick


def planned_cases(
    model: str, mode: str, row_tokens: int, packing: bool, target: Target, quick: bool
) -> list[Case]:
    """Plans for random budgets, each between the memory of one micro-batch and of the next larger one.

    The planner searches for the largest micro-batch that fits, not for the fastest plan, so that memory is
    the limit.

    Args:
        model: name of the architecture.
        mode: "full", "lora" or "qlora".
        row_tokens: tokens per row.
        packing: whether rows are packed.
        target: the device.
        quick: tiny micro-batches.
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
        device=Device(
            target.kind,
            target.name,
            bf16=target.kind == "cuda",
            compute_capability=target.compute_capability,
        ),
        world_size=1,
        rows=PLANNED_ROWS,
        max_seq_len=row_tokens,
        attention=choose_attention("auto", architecture_, target.kind),
    )
    checkpointed = [draft for draft in drafts if draft.activations.recomputes]
    random_share = random.Random(f"{model} {mode}")
    needed = estimator(architecture_, target.budget)
    cases = []
    sizes = [draft.rows_per_micro_batch * row_tokens for draft in checkpointed]
    for tokens in planned_tokens(model, quick):
        first = next(index for index, size in enumerate(sizes) if size >= tokens)
        around = checkpointed[first : first + 2]
        low, high = (needed(config, draft, complete=True).process_bytes for draft in around)
        budget = round(low + random_share.random() * (high - low))
        estimate = estimator(architecture_, replace(target.budget, budget_bytes=budget))
        plan, _ = choose_plan(config, drafts, estimate, _prefer_large)
        cases.append(_planned(model, mode, target, config, plan, drafts, budget))
    return cases


def planned_tokens(model: str, quick: bool) -> tuple[int, ...]:
    """Approximate tokens of the micro-batches of the plans for a model and mode."""
    if quick:
        return 128, 256
    models = list(MEASURED)
    is_large = models.index(model) >= models.index(LARGE_FROM)
    return PLANNED_TOKENS["large" if is_large else "small"]


def _prefer_large(config: RunConfig, plan: Plan) -> float:
    """A clock by which the speed is proportional to the micro-batch."""
    return 1 / plan.batch.micro


def _planned(
    model: str, mode: str, target: Target, config: RunConfig, plan: Plan, drafts: list[Plan], budget: int
) -> Case:
    unit = "tokens packed" if plan.rows.packing else f"rows of {plan.rows.max_seq_len}"
    return Case(
        key=f"planned {model} {mode} {budget / 2**30:.2f} GiB: {plan.batch.micro} {unit}",
        model=model,
        spec=StepSpec.of(config, plan),
        budget_bytes=budget,
        allowed_bytes=budget + guard(target.kind, budget).bytes - target.budget.context_bytes,
        memory_is_limit=plan.batch.micro < max(draft.batch.micro for draft in drafts),
    )


def predict(model: str, spec: StepSpec, target: Target) -> dict[str, Any]:
    """Predicted bytes of the weights, of each phase, reserved by the allocator, and of the context."""
    budget = target.budget
    traces = shared_traces(architecture(model))
    step = traces.step(spec).on_device()
    found = estimate([SizedStep(step, first=with_births(traces, spec))], budget, complete=True)
    rounded = step.rounded(budget.granularity)
    in_layers = rounded.peaks(in_layers=True)
    terms = rounded.peaks()["forward"].terms
    phases = {phase: size for phase, size in found.phases.items() if phase != "load"}
    return {
        "weights": terms["weights"] + terms["adapters"],
        "phases": phases,
        "in_layers": {
            phase: peak.bytes + budget.workspace_bytes for phase, peak in in_layers.items() if phase != "load"
        },
        "reserved": found.reserved_bytes,
        "context": budget.context_bytes,
    }
