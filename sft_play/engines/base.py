"""What an engine is: how the processes of a run share the work, as one object that everything asks.

An engine has no state. Methods that need torch import it when they are called, so that planning and launching
stay light. The defaults are those of a single process; `registry.py` lists all engines.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sft_play.config.schema import RunConfig
from sft_play.plan import Plan
from sft_play.timeline import Step


@dataclass(frozen=True)
class Message:
    """A collective operation, `times` times per optimizer step."""

    kind: str  # all_reduce or all_gather
    tensor_bytes: float
    times: int


@dataclass(frozen=True, kw_only=True)
class Division:
    """How a step is divided among processes: what an engine's memory depends on besides the step."""

    world_size: int
    accumulates: bool  # whether an optimizer step has several micro-batches
    element_bytes: int  # of a trained element and of its gradient
    state_bytes: Callable[[int], int]  # of the optimizer, for so many elements in one fp32 vector


class Engine:
    """How processes share the work; these are the answers of a single process."""

    name = "none"  # in plans and, unless it is a single process, in `parallel.engine`
    label = "one process"
    principle = ""  # what it does to the memory of a process, for a sentence of the plan
    distributed_type = "NO"  # of accelerate
    packages: tuple[str, ...] = ()  # that it needs besides those of every run
    distributes = False  # over several processes
    trades_speed = False  # for memory, more than the clock knows of: chosen only where no other engine fits
    casts_model = False  # to 16 bits, adapters too, instead of autocasting
    keeps_gradients = False  # in buffers that are never freed
    shards_state = False  # each process has fp32 weights and states of its part, and saves them itself

    def problem(self, config: RunConfig) -> str | None:
        """Why a run cannot use it; None if it can."""
        return None

    def accelerate_config(self, device: str, nodes: int) -> str:
        """The name of the shipped accelerate config, in configs/accelerate, without its ending.

        Args:
            device: "cuda" or "cpu".
            nodes: number of machines.
        """
        return "single_gpu"

    def launch_flags(self) -> Mapping[str, Any]:
        """Further flags of `accelerate launch`."""
        return {}

    def prepare_launch(self) -> None:
        """Clears what an earlier run has left behind and would stop this one."""

    def require_agreement(self, config: RunConfig, plan: Plan) -> None:
        """Checks, before anything is launched, that the engine's own config file agrees with the plan.

        Raises:
            ConfigError: it does not; lists every field.
        """

    def transform(self, step: Step, division: Division) -> Step:
        """The step of one process among several.

        Args:
            step: of a single process, with blocks as large as the allocator makes them. If the engine
                distributes, gradients are live from the start.
            division: among how many processes, and how.
        """
        return step

    def saved_from_memory(self, terms: Mapping[str, int]) -> dict[str, int]:
        """What is in memory while a checkpoint is saved: weights, states and what is never freed.

        Args:
            terms: the breakdown of the forward pass, in bytes.
        """
        kept = {"weights", "adapters", "optimizer"} | ({"gradients"} if self.keeps_gradients else set())
        return {name: size if name in kept else 0 for name, size in terms.items()}

    def messages(self, gradient_bytes: int, accumulation: int) -> tuple[Message, ...]:
        """What the processes exchange in an optimizer step.

        Args:
            gradient_bytes: of all trained parameters.
            accumulation: micro-batches per step of each process.
        """
        return ()

    def update_share(self, world_size: int) -> float:
        """The share of the trained elements that a process updates."""
        return 1.0
