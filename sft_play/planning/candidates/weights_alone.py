"""Plans that are out of reach: their weights alone exceed the memory, which takes no trace to know."""

from collections.abc import Sequence

from sft_play.config.schema import RunConfig
from sft_play.engines.registry import engine_of, label_of
from sft_play.plan import Plan
from sft_play.reasons.choices import WeightsAlone
from sft_play.reasons.reason import Reason
from sft_play.sizing.facts.architecture import Architecture
from sft_play.sizing.step import StepSpec
from sft_play.units import BYTES_PER_ELEMENT


def not_too_large(
    config: RunConfig, architecture: Architecture, drafts: Sequence[Plan], budget_bytes: int
) -> tuple[list[Plan], list[Reason]]:
    """The drafts that may fit a process's budget, and why the others are left out.

    Of those that offload nothing, the ones that hold least stay: if nothing fits, the smallest is named.
    """
    here = [draft for draft in drafts if not draft.sharing.offloads]
    held = {id(draft): weight_bytes(config, architecture, draft) for draft in here}
    least = min(held.values(), default=0)
    beyond = {key for key, size in held.items() if size > max(budget_bytes, least)}
    if not beyond:
        return list(drafts), []
    names = dict.fromkeys(
        label_of(each.sharing.engine, each.sharing.replicas) for each in here if id(each) in beyond
    )
    reason = WeightsAlone(", ".join(names), min(held[key] for key in beyond))
    return [draft for draft in drafts if id(draft) not in beyond], [reason]


def weight_bytes(config: RunConfig, architecture: Architecture, plan: Plan) -> int:
    """The least that a process holds of the base's weights, in the type in which its engine keeps them."""
    if config.tuning.mode == "qlora":
        size = architecture.modules.four_bit_bytes
    else:
        size = architecture.modules.weights * BYTES_PER_ELEMENT[StepSpec.of(config, plan).precision.dtype]
    return size // plan.sharing.shards if engine_of(plan.sharing.engine).shards_weights else size
