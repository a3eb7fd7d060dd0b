"""FSDP2: weights, gradients and optimizer states are divided among the processes, by `fully_shard`."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from sft_play.config.schema import RunConfig
from sft_play.engines.base import Division
from sft_play.engines.sharded import Sharded
from sft_play.plan import Plan
from sft_play.timeline import Step
from sft_play.units import AUTOCAST


def gathered_dtype(mode: str, dtype: str, mixed_precision: str) -> str | None:
    """The type that weights are gathered in, by its name in torch; None: their own.

    Where autocast would cast all weights to bf16 anyway, half of the bytes are sent and held.
    """
    cast = mode == "full" and dtype == "float32" and mixed_precision == "bf16"
    return AUTOCAST[mixed_precision] if cast else None


class Fsdp2(Sharded):
    """PyTorch's fully sharded data parallelism, by `fully_shard`."""

    def divide(self, units: Sequence[Any], config: RunConfig, plan: Plan) -> None:
        """Each process keeps its part of each parameter."""
        from sft_play.engines.shards import shard

        # a decomposition may find other signs in another process
        from_first_rank = config.tuning.mode != "full" and config.tuning.lora.init != "default"
        shard(
            units,
            plan.device,
            gathered_dtype=gathered_dtype(config.tuning.mode, plan.precision.dtype, plan.precision.autocast),
            from_first_rank=from_first_rank,
            replicas=plan.sharing.replicas,
            offload=plan.sharing.offloads,
            defers_exchange=plan.sharing.defers_exchange,
            reshard_after_forward=plan.sharing.reshard_after_forward,
        )

    def transform(self, step: Step, division: Division) -> Step:
        """Nothing is added: the trace of a step with divided weights (`sizing.trace.sharded`) has it all.

        That is, all that is allocated through PyTorch. NCCL's buffers are in the communicator of the budget.
        To save weights, each is gathered alone, which is less than the layer that a forward pass gathers.
        """
        if division.states_on_disk:
            return step.without("optimizer")
        return step

    def torch_half(self) -> ModuleType:
        """Parameters are DTensors."""
        from sft_play.engines import shards

        return shards
