"""What the training methods of a run mean for its memory and its time, in sentences for the plan."""

from collections.abc import Callable

from sft_play.config.methods import PAGED
from sft_play.config.schema import LoraSettings, RunConfig
from sft_play.plan import Plan
from sft_play.units import format_bytes


def method_notes(config: RunConfig, plan: Plan, trained_elements: Callable[[], int]) -> list[str]:
    """One sentence for each method that is not the default.

    Args:
        config: the run.
        plan: of the run, with its memory.
        trained_elements: counts the trained elements, for which steps may have to be traced.
    """
    return [
        *_optimizer_note(config.train.optimizer, plan, trained_elements),
        *(_adapter_notes(config.tuning.lora, plan) if config.tuning.mode != "full" else []),
        *_noise_note(config.train.neftune_noise_alpha),
    ]


def _optimizer_note(optimizer: str, plan: Plan, trained_elements: Callable[[], int]) -> list[str]:
    if optimizer == "adamw" or plan.memory is None:
        return []
    states = plan.memory.phase_terms["forward"]["optimizer"]
    if not optimizer.startswith(PAGED):
        return [f"{optimizer}: {format_bytes(states)} of optimizer states in each process"]
    each = (1 if optimizer.endswith("8bit") else 4) * (1 if "lion" in optimizer else 2)
    paged = each * trained_elements() - states
    found = f"{optimizer}: {format_bytes(states)} of optimizer states"
    if paged <= 0:
        return [f"{found}, none of them paged: only those of large weights are"]
    return [
        f"{found} on the GPU, and about {format_bytes(paged)} that move to RAM, which costs time, while the "
        "GPU is full; not counted below"
    ]


def _adapter_notes(lora: LoraSettings, plan: Plan) -> list[str]:
    notes = []
    if lora.rank_pattern:
        others = ", ".join(f"{rank} for {name}" for name, rank in lora.rank_pattern.items())
        notes.append(f"rank {lora.r}, but {others}")
    if lora.plus_ratio:
        rate = plan.learning_rate * lora.plus_ratio
        notes.append(f"LoRA+: learning rate {rate:.2e} for B, {plan.learning_rate:.2e} for A")
    if lora.init != "default":
        notes.append(
            f"{lora.init}: every adapted weight is decomposed before the first step; the saved adapter has "
            "twice the rank"
        )
    return notes


def _noise_note(alpha: float | None) -> list[str]:
    if alpha is None:
        return []
    return [f"NEFTune: noise within {alpha:g} / sqrt(tokens of a row x hidden size) on the embeddings"]
