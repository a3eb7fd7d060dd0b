"""FSDP2: weights, gradients and optimizer states are divided among the processes, by `fully_shard`."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_play.config.schema import RunConfig
from sft_play.engines.base import Division, Engine, Message
from sft_play.engines.ddp import with_place
from sft_play.plan import Plan
from sft_play.timeline import Step
from sft_play.units import AUTOCAST
from sft_play.work import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Work

if TYPE_CHECKING:
    from sft_play.engines.state import Load, StateOf


def gathered_dtype(mode: str, dtype: str, mixed_precision: str) -> str | None:
    """The type that weights are gathered in, by its name in torch; None: their own.

    Where autocast would cast all weights to bf16 anyway, half of the bytes are sent and held.
    """
    cast = mode == "full" and dtype == "float32" and mixed_precision == "bf16"
    return AUTOCAST[mixed_precision] if cast else None


SHARD = re.compile(r"(?:optimizer_shard_|rng_state_)(\d+)")  # files that each process writes


def shard_files(checkpoint: Path) -> list[Path]:
    """The files of the optimizer's state, one for each rank that saved it, in the order of ranks."""
    files = checkpoint.glob("optimizer_shard_*.safetensors")
    return sorted(files, key=lambda path: int(SHARD.search(path.name)[1]))  # type: ignore[index]


def messages_of_units(work: Work, plan: Plan) -> tuple[Message, ...]:
    """What processes send that gather a model unit by unit, as in the trace of a step's last micro-batch.

    Weights are gathered for the forward and for the backward pass, and gradients reduced, each process
    getting its part; replicas reduce theirs once per step.
    """
    each = plan.gradient_accumulation_steps
    kinds = {
        "all_gather": (ALL_GATHER, each),
        "reduce_scatter": (REDUCE_SCATTER, 1 if plan.defers_exchange else each),
        "all_reduce": (ALL_REDUCE, 1),
    }
    return tuple(
        Message(name, size, passes * times)
        for name, (kind, passes) in kinds.items()
        for size, times in work.exchanged(kind).items()
    )


class Fsdp2(Engine):
    """PyTorch's fully sharded data parallelism, by `fully_shard`."""

    name, label, target, mark = "fsdp2", "FSDP2", "train-fsdp", "f"
    principle = "divides weights, gradients and optimizer states among the processes"
    distributed_type = "MULTI_GPU"
    distributes = trades_speed = shards_state = shards_weights = answers_together = replicates = True
    can_defer = True
    loads_own_state = False
    offloads = ("ram",)
    file_of_rank = SHARD

    def problem(self, config: RunConfig) -> str | None:
        """The optimizer cannot update a part of a tensor."""
        optimizer = config.train.optimizer
        if optimizer == "adamw":
            return None
        return (
            f"train.optimizer={optimizer} does not work with parallel.engine={self.name}, which divides each "
            "weight among the processes; use train.optimizer=adamw, or parallel.engine=ddp"
        )

    def accelerate_config(self, device: str, nodes: int) -> str:
        """That of DDP: the model is divided before accelerate sees it."""
        return with_place("ddp", device, nodes)

    def divide(self, units: Sequence[Any], config: RunConfig, plan: Plan) -> None:
        """Each process keeps its part of each parameter."""
        from sft_play.engines.shards import shard

        # a decomposition may find other signs in another process
        like_first = config.tuning.mode != "full" and config.tuning.lora.init != "default"
        shard(
            units,
            plan.device,
            gathered_dtype=gathered_dtype(config.tuning.mode, plan.dtype, plan.mixed_precision),
            like_first=like_first,
            replicas=plan.replicas,
            offload=plan.offload != "none",
            defers_exchange=plan.defers_exchange,
        )

    def transform(self, step: Step, division: Division) -> Step:
        """Nothing is added: the trace of a step whose weights are divided (`sizing.sharded`) has it all.

        That is, all that is allocated through PyTorch. NCCL's buffers are in the communicator of the budget.
        To save weights, each is gathered alone, which is less than the layer that a forward pass gathers.
        """
        return step

    def state_files(self, checkpoint: Path) -> list[Path]:
        """One file for each rank that saved it."""
        return shard_files(checkpoint)

    def save_state(self, optimizer: Any, model: Any, checkpoint: Path) -> bool:
        """Each process of the first replica writes its part."""
        from sft_play.engines.shards import save_shards

        save_shards(optimizer, {parameter: name for name, parameter in model.named_parameters()}, checkpoint)
        return True

    def read_state(self, checkpoint: Path, names: Sequence[str], load: "Load") -> "StateOf":
        """Joins the parts of all ranks."""
        from sft_play.engines.shards import read_shards

        return read_shards(self.state_files(checkpoint))

    def set_state(self, optimizer: Any, parameters: Mapping[str, Any], state_of: "StateOf") -> None:
        """Each process takes its part."""
        from sft_play.engines.shards import set_shards

        set_shards(optimizer, parameters, state_of)

    def load_weights(self, model: Any, checkpoint: Path) -> bool:
        """Each process takes its part of the trained weights."""
        from sft_play.engines.shards import set_weight
        from sft_play.engines.state import saved_weights

        weight_of = saved_weights(checkpoint)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                set_weight(parameter, weight_of(name))
        return True

    def full_weights(self, model: Any) -> dict[str, Any] | None:
        """Gathered tensor by tensor, into the memory of the first process's machine."""
        from sft_play.engines.shards import gathered_weights

        return gathered_weights(model)

    def update_share(self, world_size: int) -> float:
        """A process updates its part."""
        return 1 / world_size

    def messages(self, work: Work, element_bytes: int, plan: Plan) -> tuple[Message, ...]:
        """Those that `fully_shard` sent in the trace of a micro-batch."""
        return messages_of_units(work, plan)
