"""ZeRO-2 of DeepSpeed: optimizer states, fp32 weights and gradients are partitioned among the processes.

After stage_1_and_2.py of DeepSpeed.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_play.config.schema import RunConfig
from sft_play.engines import deepspeed
from sft_play.engines.base import Division, Engine, Message
from sft_play.engines.ddp import with_place
from sft_play.plan import Plan
from sft_play.timeline import Buffer, Step
from sft_play.work import Work

if TYPE_CHECKING:
    from sft_play.engines.state import Load, StateOf

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
        """Those of the shipped DeepSpeed config; what it does not say, DeepSpeed decides."""
        zero = deepspeed.read_config(deepspeed.CONFIG).get("zero_optimization", {})
        elements = zero.get("reduce_bucket_size", cls.elements)
        return cls(elements=int(elements), overlap=bool(zero.get("overlap_comm")))

    def bytes(self, trained_elements: int, element_bytes: int) -> int:
        """Bytes of the buffers that collect gradients; overlapping communication needs a second one.

        If all gradients fit into one bucket, they are reduced at the end of the backward pass and there is
        nothing to overlap with, so `deepspeed.checked_config` turns overlapping off.
        """
        overlaps = self.overlap and self.elements < trained_elements
        return (2 if overlaps else 1) * element_bytes * min(self.elements, trained_elements)


class Zero2(Engine):
    """DeepSpeed's ZeRO, stage 2."""

    name, label, target, mark = "deepspeed_z2", "ZeRO-2", "train-deepspeed", "z"
    principle = "partitions optimizer states and gradients"
    distributed_type = "DEEPSPEED"
    packages = ("deepspeed",)
    distributes = trades_speed = casts_model = shards_state = True
    file_of_rank = re.compile(r"(?:zero_pp_rank_|rng_state_)(\d+)")

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

    def while_starting(self, say: Callable[[str], None]) -> AbstractContextManager[None]:
        """Says when DeepSpeed compiles an extension."""
        return deepspeed.slow_builds_told(say)

    def require_agreement(self, config: RunConfig, plan: Plan) -> None:
        """Checks the DeepSpeed config."""
        deepspeed.checked_config(deepspeed.CONFIG, plan, max_grad_norm=config.train.max_grad_norm)

    def trainer_arguments(
        self, config: RunConfig, plan: Plan, *, trained_parameters: int, shared: bool
    ) -> dict[str, Any]:
        """The DeepSpeed config; its buckets need not be larger than the trained parameters."""
        tree = deepspeed.checked_config(
            deepspeed.CONFIG,
            plan,
            max_grad_norm=config.train.max_grad_norm,
            trainable_parameters=trained_parameters,
        )
        if not shared:
            tree = {**tree, "checkpoint": {**tree.get("checkpoint", {}), "use_node_local_storage": True}}
        return {"deepspeed": tree}

    def backward_arguments(self) -> dict[str, Any]:
        """DeepSpeed would divide by the number of micro-batches once more."""
        return {"scale_wrt_gas": False}

    def updated(self, model: Any) -> bool:
        """DeepSpeed updates before it returns the norm, unless it has noticed an overflow."""
        return not model.optimizer.overflow

    def state_files(self, checkpoint: Path) -> list[Path]:
        """One file for each rank that saved it."""
        files = checkpoint.glob("global_step*/*zero_pp_rank_*_optim_states.pt")
        return sorted(files, key=lambda path: int(self.file_of_rank.search(path.name)[1]))  # type: ignore[index]

    def read_state(self, checkpoint: Path, names: Sequence[str], load: "Load") -> "StateOf":
        """Joins the parts of all ranks."""
        from sft_play.engines.zero2_state import read_parts

        return read_parts(self.state_files(checkpoint), load)

    def trained_by(self, optimizer: Any) -> list[Any]:
        """DeepSpeed's own optimizer has one vector for each group in place of the parameters."""
        return [parameter for group in optimizer.bit16_groups for parameter in group]

    def set_state(self, optimizer: Any, parameters: Mapping[str, Any], state_of: "StateOf") -> None:
        """DeepSpeed takes this rank's part of each parameter."""
        from sft_play.engines.zero2_state import set_part

        set_part(optimizer, parameters, state_of)

    def go_on_from(self, model: Any, step: int) -> None:
        """The folder of the next checkpoint has this count in its name."""
        model.global_steps = step

    def complete_checkpoint(self, checkpoint: Path) -> None:
        """DeepSpeed writes the name of the newest folder on the main rank only."""
        for folder in checkpoint.glob("global_step*"):
            (checkpoint / "latest").write_text(folder.name, encoding="utf-8")

    def classes_of_state(self) -> list[Any]:
        """The four classes of which its optimizer state consists."""
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]

    def state_on_disk(self, elements: int, state_bytes: int) -> int:
        """The fp32 weights of all processes are saved with their states."""
        return FP32 * elements + state_bytes

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

    def messages(self, work: Work, element_bytes: int, accumulation: int) -> tuple[Message, ...]:
        """Gradients of each micro-batch are reduced, and the updated weights gathered once.

        Although each process keeps only its part, all get the whole (`use_multi_rank_bucket_allreduce`).
        """
        gradient_bytes = work.trained_elements * element_bytes
        return (
            Message("all_reduce", gradient_bytes, accumulation),
            Message("all_gather", gradient_bytes, 1),
        )

    def update_share(self, world_size: int) -> float:
        """A process updates its part."""
        return 1 / world_size
