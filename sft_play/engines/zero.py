"""What the stages of DeepSpeed's ZeRO have in common: how they are launched, configured and stepped."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sft_play.config.schema import RunConfig
from sft_play.engines import deepspeed
from sft_play.engines.base import FP32, Engine
from sft_play.plan import Plan
from sft_play.upstream.deepspeed import inference_left_out, let_go, slow_builds_told, stage_saved_by_value
from sft_play.upstream.patching import lasting


class Zero(Engine):
    """DeepSpeed's ZeRO."""

    stage = 0  # of ZeRO

    def launch_flags(self) -> Mapping[str, Any]:
        """The DeepSpeed config."""
        return {"deepspeed_config_file": deepspeed.config_file(self.stage)}

    def prepare_launch(self) -> None:
        """Removes stale locks of DeepSpeed's extension build."""
        deepspeed.clear_abandoned_locks(deepspeed.extensions_folder())

    @contextmanager
    def while_starting(self, say: Callable[[str], None]) -> Iterator[None]:
        """Says when DeepSpeed compiles an extension, and leaves out the one that no training uses."""
        with inference_left_out(), slow_builds_told(say):
            yield

    def trainer_arguments(
        self, config: RunConfig, plan: Plan, *, trained_parameters: int, shared: bool
    ) -> dict[str, Any]:
        """The DeepSpeed config."""
        lasting(stage_saved_by_value)
        tree = deepspeed.configuration(self.stage, trained_parameters)
        if not shared:
            tree = {**tree, "checkpoint": {"use_node_local_storage": True}}
        return {"deepspeed": tree}

    def let_go(self, model: object) -> None:
        """Takes off what would keep DeepSpeed's engine alive."""
        if hasattr(model, "destroy"):
            let_go(model)

    def backward_arguments(self) -> dict[str, bool]:
        """DeepSpeed would divide by the number of micro-batches once more."""
        return {"scale_wrt_gas": False}

    def updated(self, model: Any) -> bool:
        """DeepSpeed updates before it returns the norm, unless it has noticed an overflow."""
        return not model.optimizer.overflow

    def go_on_from(self, model: Any, step: int) -> None:
        """The folder of the next checkpoint has this count in its name."""
        model.global_steps = step

    def state_on_disk(self, elements: int, state_bytes: int) -> int:
        """The fp32 weights of all processes are saved with their states."""
        return FP32 * elements + state_bytes
