"""What the stages of DeepSpeed's ZeRO have in common: how they are launched, configured and stepped."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from sft_play.choices.optimizers import OPTIMIZERS, Divided
from sft_play.config.schema import RunConfig
from sft_play.engines import deepspeed
from sft_play.engines.base import Engine
from sft_play.engines.ddp import with_place
from sft_play.plan import Plan

# What DeepSpeed's optimizers leave on parameters when they are destroyed, themselves among it.
LEFT_ON_PARAMETERS = ("_zero_optimizer", "_z3_optimizer", "grad_accum")


class Zero(Engine):
    """DeepSpeed's ZeRO."""

    stage = 0
    divides_states: Divided = "cut"
    distributed_type = "DEEPSPEED"
    packages = ("deepspeed",)
    distributes = trades_speed = casts_model = shards_state = joins_trained = True

    def problem(self, config: RunConfig) -> str | None:
        """The states of the optimizer cannot be divided so."""
        optimizer = config.train.optimizer
        able = [each.name for each in OPTIMIZERS.values() if self.divides_states in each.divided]
        if optimizer in able:
            return None
        supported, take = " and ".join(able), "it" if len(able) == 1 else "one of them"
        return (
            f"train.optimizer={optimizer} does not work with parallel.engine={self.name}, which supports "
            f"{supported}; use {take}, or parallel.engine=ddp"
        )

    def accelerate_config(self, device: str, nodes: int) -> str:
        """One for several machines, one for GPUs and one for the CPU."""
        return with_place(f"zero{self.stage}", device, nodes)

    def launch_flags(self) -> Mapping[str, Any]:
        """The DeepSpeed config."""
        return {"deepspeed_config_file": deepspeed.config_file(self.stage)}

    def prepare_launch(self) -> None:
        """Removes stale locks of DeepSpeed's extension build."""
        deepspeed.clear_abandoned_locks(deepspeed.extensions_folder())

    def while_starting(self, say: Callable[[str], None]) -> AbstractContextManager[None]:
        """Says when DeepSpeed compiles an extension."""
        return deepspeed.slow_builds_told(say)

    def require_agreement(self, config: RunConfig, plan: Plan) -> None:
        """Checks the DeepSpeed config."""
        self.checked_config(config, plan)

    def checked_config(
        self, config: RunConfig, plan: Plan, trained_parameters: int | None = None
    ) -> dict[str, Any]:
        """The DeepSpeed config for the trainer; its buckets need not be larger than what is trained.

        Raises:
            ConfigError: it cannot be read, or contradicts the plan.
        """
        return deepspeed.checked_config(
            deepspeed.config_file(self.stage),
            plan,
            self.stage,
            max_grad_norm=config.train.max_grad_norm,
            trainable_parameters=trained_parameters,
        )

    def trainer_arguments(
        self, config: RunConfig, plan: Plan, *, trained_parameters: int, shared: bool
    ) -> dict[str, Any]:
        """The DeepSpeed config."""
        tree = self.checked_config(config, plan, trained_parameters)
        if not shared:
            tree = {**tree, "checkpoint": {**tree.get("checkpoint", {}), "use_node_local_storage": True}}
        return {"deepspeed": tree}

    def let_go(self, model: Any) -> None:
        """Takes off what would keep DeepSpeed's engine alive: its hooks, and what parameters refer to."""
        if not hasattr(model, "destroy"):
            return
        model.destroy()
        model.module_forward_pre_hook.remove()
        model.module_forward_post_hook.remove()
        for parameter in model.module.parameters():
            for name in LEFT_ON_PARAMETERS:
                vars(parameter).pop(name, None)

    def backward_arguments(self) -> dict[str, Any]:
        """DeepSpeed would divide by the number of micro-batches once more."""
        return {"scale_wrt_gas": False}

    def updated(self, model: Any) -> bool:
        """DeepSpeed updates before it returns the norm, unless it has noticed an overflow."""
        return not model.optimizer.overflow

    def go_on_from(self, model: Any, step: int) -> None:
        """The folder of the next checkpoint has this count in its name."""
        model.global_steps = step

    def update_share(self, world_size: int) -> float:
        """A process updates its part."""
        return 1 / world_size
