"""What the engines that divide weights have in common: FSDP2 and ZeRO-3."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sft_play.engines.base import NOTHING_CAST, Engine, Message, by_rank
from sft_play.plan import Plan
from sft_play.work import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Work

if TYPE_CHECKING:
    from torch import Tensor, dtype
    from torch.nn import Module

    from sft_play.engines.state import Load, StateOf


class Sharded(Engine):
    """An engine of which each process holds a part of each weight."""

    def torch_half(self) -> ModuleType:
        """A module with `save_parts`, `set_parts`, `set_weight` and `gathered` for its parts."""
        raise NotImplementedError

    def state_files(self, checkpoint: Path) -> list[Path]:
        """One file for each rank that saved it, in the order of ranks."""
        return by_rank(checkpoint.glob("optimizer_shard_*.safetensors"))

    def save_state(self, optimizer: object, model: Any, checkpoint: Path) -> bool:
        """Each process writes its part."""
        names = {parameter: name for name, parameter in model.named_parameters()}
        self.torch_half().save_parts(optimizer, names, checkpoint)
        return True

    def read_state(self, checkpoint: Path, names: Sequence[str], load: "Load") -> "StateOf":
        """Joins the parts of all ranks."""
        from sft_play.engines.shards import read_shards

        return read_shards(self.state_files(checkpoint))

    def set_state(self, optimizer: object, parameters: Mapping[str, Any], state_of: "StateOf") -> None:
        """Each process takes its part."""
        self.torch_half().set_parts(optimizer, parameters, state_of)

    def load_weights(self, model: Any, checkpoint: Path) -> bool:
        """Each process takes its part of the trained weights."""
        from sft_play.engines.state import saved_weights

        weight_of = saved_weights(checkpoint)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self.torch_half().set_weight(parameter, weight_of(name))
        return True

    def full_weights(
        self, model: "Module", types: Mapping[str, "dtype"] = NOTHING_CAST
    ) -> dict[str, "Tensor"] | None:
        """Gathered tensor by tensor (`engines.whole`)."""
        from sft_play.engines.whole import whole_weights

        return whole_weights(model, self.torch_half().gathered, types)

    def messages(self, work: Work, element_bytes: int, plan: Plan) -> tuple[Message, ...]:
        """Those of gathering a model unit by unit, as in the trace of a step's last micro-batch.

        Weights are gathered for the forward and for the backward pass, and gradients reduced, each process
        getting its part; replicas reduce theirs once per step.
        """
        each = plan.batch.accumulation
        kinds = {
            "all_gather": (ALL_GATHER, each),
            "reduce_scatter": (REDUCE_SCATTER, 1 if plan.sharing.defers_exchange else each),
            "all_reduce": (ALL_REDUCE, 1),
        }
        return tuple(
            Message(name, size, passes * times)
            for name, (kind, passes) in kinds.items()
            for size, times in work.exchanged(kind).items()
        )
