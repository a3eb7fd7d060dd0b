"""ZeRO-3 of DeepSpeed: weights are partitioned among the processes too, and gathered layer by layer.

After partition_parameters.py, parameter_offload.py and stage3.py of DeepSpeed.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_play.config.schema import RunConfig
from sft_play.engines import deepspeed
from sft_play.engines.base import Division, Message
from sft_play.engines.fsdp2 import SHARD, messages_of_units, shard_files
from sft_play.engines.zero import Zero
from sft_play.plan import Plan
from sft_play.timeline import Buffer, Step
from sft_play.units import AUTOCAST
from sft_play.work import Work

if TYPE_CHECKING:
    from sft_play.engines.state import Load, StateOf


FP32 = 4  # bytes


class Zero3(Zero):
    """DeepSpeed's ZeRO, stage 3."""

    name, label, target, mark, stage = "deepspeed_z3", "ZeRO-3", "train-deepspeed", "Z", 3
    principle = "partitions weights, gradients and optimizer states among the processes"
    shards_weights = regathers = wraps_shards = for_the_asking = True
    loads_own_state = False
    file_of_rank = SHARD

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

    def state_files(self, checkpoint: Path) -> list[Path]:
        """One file for each rank that saved it."""
        return shard_files(checkpoint)

    def save_state(self, optimizer: Any, model: Any, checkpoint: Path) -> bool:
        """Each process writes its part, and of the fp32 weights."""
        from sft_play.engines.zero3_parts import save_parts

        save_parts(optimizer, {parameter: name for name, parameter in model.named_parameters()}, checkpoint)
        return True

    def read_state(self, checkpoint: Path, names: Sequence[str], load: "Load") -> "StateOf":
        """Joins the parts of all ranks."""
        from sft_play.engines.shards import read_shards

        return read_shards(self.state_files(checkpoint))

    def trained_by(self, optimizer: Any) -> list[Any]:
        """DeepSpeed's own optimizer has one vector for each group in place of the parameters."""
        return [parameter for group in optimizer.fp16_groups for parameter in group]

    def set_state(self, optimizer: Any, parameters: Mapping[str, Any], state_of: "StateOf") -> None:
        """Each process takes its part."""
        from sft_play.engines.zero3_parts import set_parts

        set_parts(optimizer, parameters, state_of)

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

    def load_weights(self, model: Any, checkpoint: Path) -> bool:
        """Each process takes its part of the trained weights."""
        from sft_play.engines.state import saved_weights
        from sft_play.engines.zero3_parts import set_weight

        weight_of = saved_weights(checkpoint)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                set_weight(parameter, weight_of(name))
        return True

    def full_weights(self, model: Any) -> dict[str, Any] | None:
        """Gathered tensor by tensor, into the memory of the first process's machine."""
        from sft_play.engines.zero3_parts import gathered_weights

        return gathered_weights(model)

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

    def messages(self, work: Work, element_bytes: int, plan: Plan) -> tuple[Message, ...]:
        """Weights are gathered in both passes, and gradients reduced."""
        return messages_of_units(work, plan)

    def state_on_disk(self, elements: int, state_bytes: int) -> int:
        """The fp32 weights of all processes are saved with their states."""
        return FP32 * elements + state_bytes
