"""What the training methods of a run mean for its memory and its time."""

from collections.abc import Callable

from sft_play.config.methods import PAGED
from sft_play.config.schema import LoraSettings, RunConfig
from sft_play.plan import Plan
from sft_play.reasons import Decomposed, LoraPlus, Noise, OptimizerStates, Ranks, Reason


def method_reasons(config: RunConfig, plan: Plan, trained_elements: Callable[[], int]) -> list[Reason]:
    """One for each method that is not the default.

    Args:
        config: the run.
        plan: of the run, with its memory.
        trained_elements: counts the trained elements, for which steps may have to be traced.
    """
    optimizer, alpha = config.train.optimizer, config.train.neftune_noise_alpha
    adapters = _of_adapters(config.tuning.lora, plan) if config.tuning.mode != "full" else []
    noise = [] if alpha is None else [Noise(alpha)]
    return [*_of_optimizer(optimizer, plan, trained_elements), *adapters, *noise]


def _of_optimizer(optimizer: str, plan: Plan, trained_elements: Callable[[], int]) -> list[Reason]:
    if optimizer == "adamw" or plan.memory is None:
        return []
    states = plan.memory.phase_terms["forward"]["optimizer"]
    if not optimizer.startswith(PAGED):
        return [OptimizerStates(optimizer, states)]
    each = (1 if optimizer.endswith("8bit") else 4) * (1 if "lion" in optimizer else 2)
    return [OptimizerStates(optimizer, states, each * trained_elements() - states)]


def _of_adapters(lora: LoraSettings, plan: Plan) -> list[Reason]:
    found: list[Reason] = []
    if lora.rank_pattern:
        found.append(Ranks(lora.r, tuple(lora.rank_pattern.items())))
    if lora.plus_ratio:
        found.append(LoraPlus(plan.learning_rate, lora.plus_ratio))
    if lora.init != "default":
        found.append(Decomposed(lora.init))
    return found
