"""ZeRO-3 of DeepSpeed: weights are partitioned among the processes too, and gathered layer by layer.

After partition_parameters.py, parameter_offload.py and stage3.py of DeepSpeed.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

from sft_play.config.schema import RunConfig
from sft_play.engines import deepspeed
from sft_play.engines.base import Division
from sft_play.engines.sharded import Sharded
from sft_play.engines.zero import Zero
from sft_play.plan import Plan
from sft_play.timeline import Buffer, Step
from sft_play.units import AUTOCAST

FP32 = 4  # bytes


class Zero3(Sharded, Zero):
    """DeepSpeed's ZeRO, stage 3."""

    name, label, target, mark, stage = "deepspeed_z3", "ZeRO-3", "train-deepspeed", "Z", 3
    principle = "partitions weights, gradients and optimizer states among the processes"
    regathers = wraps_shards = for_the_asking = True

    def divide(self, units: Sequence[Any], config: RunConfig, plan: Plan) -> None:
        """Each process keeps its part of each parameter."""
        from sft_play.engines.zero3_parts import partition

        partition(units, plan.device, AUTOCAST.get(plan.mixed_precision))

    def computing(self, model: Any) -> AbstractContextManager[None]:
        """In the block, modules gather their weights, as they do in training."""
        from sft_play.engines.zero3_parts import gathering

        return gathering(model)

    def let_go(self, model: Any) -> None:
        """Takes DeepSpeed's hooks off the model."""
        from sft_play.engines.zero3_parts import let_go

        let_go(model)

    def torch_half(self) -> ModuleType:
        """Parameters have their part in `ds_tensor`."""
        from sft_play.engines import zero3_parts

        return zero3_parts

    def trained_by(self, optimizer: Any) -> list[Any]:
        """DeepSpeed's own optimizer has one vector for each group in place of the parameters."""
        return [parameter for group in optimizer.fp16_groups for parameter in group]

    def trainer_arguments(
        self, config: RunConfig, plan: Plan, *, trained_parameters: int, shared: bool
    ) -> dict[str, Any]:
        """The DeepSpeed config; on a CPU, which waits for what it gathers, nothing is gathered ahead."""
        arguments = super().trainer_arguments(
            config, plan, trained_parameters=trained_parameters, shared=shared
        )
        if plan.device == "cpu":
            zero = {**arguments["deepspeed"]["zero_optimization"], "stage3_prefetch_bucket_size": 0}
            arguments["deepspeed"] = {**arguments["deepspeed"], "zero_optimization": zero}
        return arguments

    def transform(self, step: Step, division: Division) -> Step:
        """Puts fp32 weights and flat buffers in the place of gradients and optimizer states.

        The step is that of a model that `fully_shard` has divided into the same units: weights are gathered
        alike, into a buffer from which each is copied. A process keeps the reduced gradients of its part,
        and a bucket for those that it computes, which is copied to be reduced. It flattens its part and casts
        it to fp32 before the optimizer step. A GPU gathers a bucket of weights ahead of their use.
        """
        own, element = step.bytes_of("gradients"), division.element_bytes
        share = own // element
        zero = deepspeed.read_config(deepspeed.config_file(self.stage))["zero_optimization"]
        bucket = element * min(zero["reduce_bucket_size"], share * division.world_size)
        ahead = element * zero["stage3_prefetch_bucket_size"] if division.device == "cuda" else 0
        cast = FP32 * share if element != FP32 else 0
        return step.without("optimizer", "gradients").with_buffers(
            Buffer("optimizer", FP32 * share + division.state_bytes(share), "load", None),
            Buffer("gradients", own, "load", None),
            Buffer("engine", bucket, "load", None),
            Buffer("engine", ahead, "forward", "evaluation"),
            Buffer("engine", bucket, "backward", "backward"),
            Buffer("engine", own + cast, "optimizer", "optimizer"),
        )

    def state_on_disk(self, elements: int, state_bytes: int) -> int:
        """The fp32 weights of all processes are saved with their states."""
        return FP32 * elements + state_bytes
