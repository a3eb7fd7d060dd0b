"""ZeRO-2 of DeepSpeed: optimizer states, fp32 weights and gradients are partitioned among the processes.

After stage_1_and_2.py of DeepSpeed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sft_play.config.schema import RunConfig
from sft_play.engines import deepspeed
from sft_play.engines.base import Division, Engine, Message
from sft_play.engines.ddp import with_place
from sft_play.plan import Plan
from sft_play.timeline import Buffer, Step

FP32 = 4  # bytes
# The weights of a process are joined to one vector. These update each element on its own.
OPTIMIZERS = ("adamw", "adamw_8bit")


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """The settings of ZeRO-2's communication."""

    elements: int = 500_000_000  # DeepSpeed's default
    overlap: bool = True

    @classmethod
    def shipped(cls) -> "Buckets":
        """Those of the shipped DeepSpeed config."""
        zero = deepspeed.read_config(deepspeed.CONFIG)["zero_optimization"]
        return cls(elements=int(zero["reduce_bucket_size"]), overlap=bool(zero.get("overlap_comm")))

    def bytes(self, trained_elements: int, element_bytes: int) -> int:
        """Bytes of the buffers that collect gradients; overlapping communication needs a second one.

        If all gradients fit into one bucket, they are reduced at the end of the backward pass and there is
        nothing to overlap with, so `deepspeed.checked_config` turns overlapping off.
        """
        overlaps = self.overlap and self.elements < trained_elements
        return (2 if overlaps else 1) * element_bytes * min(self.elements, trained_elements)


class Zero2(Engine):
    """DeepSpeed's ZeRO, stage 2."""

    name, label = "deepspeed_z2", "ZeRO-2"
    principle = "partitions optimizer states and gradients"
    distributed_type = "DEEPSPEED"
    packages = ("deepspeed",)
    distributes = trades_speed = casts_model = shards_state = True

    def problem(self, config: RunConfig) -> str | None:
        """The optimizer does not update each element on its own."""
        optimizer = config.train.optimizer
        if optimizer in OPTIMIZERS:
            return None
        return (
            f"train.optimizer={optimizer} does not work with parallel.engine={self.name}, which supports "
            f"{' and '.join(OPTIMIZERS)}; use one of them, or parallel.engine=ddp"
        )

    def accelerate_config(self, device: str, nodes: int) -> str:
        """One for several machines, one for GPUs and one for the CPU."""
        return with_place("zero2", device, nodes)

    def launch_flags(self) -> Mapping[str, Any]:
        """The DeepSpeed config."""
        return {"deepspeed_config_file": deepspeed.CONFIG}

    def prepare_launch(self) -> None:
        """Removes stale locks of DeepSpeed's extension build."""
        deepspeed.clear_abandoned_locks(deepspeed.extensions_folder())

    def require_agreement(self, config: RunConfig, plan: Plan) -> None:
        """Checks the DeepSpeed config."""
        deepspeed.checked_config(deepspeed.CONFIG, plan, max_grad_norm=config.train.max_grad_norm)

    def transform(self, step: Step, division: Division) -> Step:
        """Puts this process's part in the place of optimizer states and gradients, and adds the buffers.

        All trained parameters are copied into one flat buffer while the model is loaded. From then on a
        process has fp32 weights and states of its part. It keeps the reduced gradients of its part, beside
        those of earlier micro-batches, and flattens them and casts them to fp32 before the optimizer step.
        """
        gradients = step.bytes_of("gradients")
        elements = gradients // division.element_bytes
        share = -(-elements // division.world_size)
        own = share * division.element_bytes
        buckets = Buckets.shipped().bytes(elements, division.element_bytes)
        return step.without("optimizer", "gradients").with_buffers(
            Buffer("optimizer", FP32 * share + division.state_bytes(share), "load", None),
            Buffer("engine", gradients, "load", "load"),
            Buffer("gradients", own if division.accumulates else 0, "forward", "backward"),
            Buffer("gradients", own, "backward", "optimizer"),
            Buffer("engine", buckets, "backward", "backward"),
            Buffer("engine", own + FP32 * share, "optimizer", "optimizer"),
        )

    def messages(self, gradient_bytes: int, accumulation: int) -> tuple[Message, ...]:
        """Gradients of each micro-batch are reduced, and the updated weights gathered once.

        Although each process keeps only its part, all get the whole (`use_multi_rank_bucket_allreduce`).
        """
        return (
            Message("all_reduce", gradient_bytes, accumulation),
            Message("all_gather", gradient_bytes, 1),
        )

    def update_share(self, world_size: int) -> float:
        """A process updates its part."""
        return 1 / world_size
