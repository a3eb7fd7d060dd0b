"""Plans out of reach: what a process always holds exceeds the memory, which takes no trace to know."""

from collections.abc import Sequence

from sft_play.choices.optimizers import OPTIMIZERS
from sft_play.config.schema import RunConfig
from sft_play.engines.base import FP32
from sft_play.engines.registry import engine_of, label_of
from sft_play.plan import Plan
from sft_play.reasons.choices import ruled_out
from sft_play.sizing.facts.architecture import Architecture
from sft_play.sizing.step import StepSpec
from sft_play.units import BYTES_PER_ELEMENT


def not_too_large(
    config: RunConfig, architecture: Architecture, drafts: Sequence[Plan], budget_bytes: int
) -> tuple[list[Plan], list[str]]:
    """The drafts that may fit a process's budget, and why the others are left out.

    Of those that offload nothing, the ones that hold least stay: if nothing fits, the smallest is named.
    """
    here = [draft for draft in drafts if not draft.sharing.offloads]
    held = {id(draft): held_bytes(config, architecture, draft) for draft in here}
    least = min(held.values(), default=0)
    too_large = [draft for draft in here if held[id(draft)] > max(budget_bytes, least)]
    if not too_large:
        return list(drafts), []
    gone = set(map(id, too_large))
    names = dict.fromkeys(label_of(each.sharing.engine, each.sharing.replicas) for each in too_large)
    weights = min(weight_bytes(config, architecture, each) for each in too_large)
    needs_states = weights <= budget_bytes
    size = min(held[key] for key in gone) if needs_states else weights
    reason = ruled_out(", ".join(names), size, with_states=needs_states)
    return [draft for draft in drafts if id(draft) not in gone], [reason]


def held_bytes(config: RunConfig, architecture: Architecture, plan: Plan) -> int:
    """The least that a process holds when its optimizer steps, of a plan that offloads nothing.

    If all weights are trained, their gradients and states besides; those of adapters are small.
    """
    held = weight_bytes(config, architecture, plan)
    if config.tuning.mode != "full":
        return held
    engine, sharing = engine_of(plan.sharing.engine), plan.sharing
    element, optimizer = StepSpec.of(config, plan).trained_element_bytes, OPTIMIZERS[config.train.optimizer]
    each = element + optimizer.least_bytes(element)
    if engine.joins_trained:  # a vector of fp32 masters, which is what the optimizer sees
        each = element + FP32 + optimizer.least_bytes(FP32)
    ranks = 1
    if engine.shards_weights:
        ranks = sharing.shards
    elif engine.shards_state:
        ranks = sharing.world_size
    return held + architecture.modules.trained * each // ranks


def weight_bytes(config: RunConfig, architecture: Architecture, plan: Plan) -> int:
    """The least that a process holds of the base's weights, in the type in which its engine keeps them."""
    if config.tuning.mode == "qlora":
        size = architecture.modules.four_bit_bytes
    else:
        size = architecture.modules.weights * BYTES_PER_ELEMENT[StepSpec.of(config, plan).precision.dtype]
    if engine_of(plan.sharing.engine).shards_weights:
        size //= plan.sharing.shards
    return size
