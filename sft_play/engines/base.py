"""What an engine is: how the processes of a run share the work, as one object that everything asks.

An engine is its traits (`choices/engines.py`) and what it does, without any state. Methods that need torch
import it when they are called, so that planning and launching stay light. The defaults are those of a single
process.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_play.choices.engines import WHOLE, Traits
from sft_play.choices.optimizers import OPTIMIZERS
from sft_play.config.schema import RunConfig
from sft_play.plan import Plan
from sft_play.timeline import Step
from sft_play.work import IN_RAM, TRANSFER, Work

if TYPE_CHECKING:
    from torch import Tensor, dtype
    from torch.nn import Module

    from sft_play.engines.state import Load, StateOf


FP32 = 4  # bytes
NOTHING_CAST: Mapping[str, "dtype"] = {}
FILE_OF_RANK = re.compile(r"(?:rng_state_|optimizer_shard_|zero_pp_rank_)(\d+)")  # that each process writes


def by_rank(files: Iterable[Path]) -> list[Path]:
    """Such files in the order of the ranks that wrote them."""
    return sorted(files, key=lambda path: int(FILE_OF_RANK.search(path.name)[1]))  # type: ignore[index]


@dataclass(frozen=True)
class Message:
    """A collective operation, `times` times per optimizer step."""

    kind: str  # all_reduce, all_gather, reduce_scatter or all_to_all
    tensor_bytes: float
    times: int


@dataclass(frozen=True, kw_only=True)
class Division:
    """How a step is divided among processes: what an engine's memory depends on besides the step."""

    world_size: int
    accumulates: bool  # whether earlier micro-batches of an optimizer step have left gradients
    precedes: bool = False  # whether only later ones follow
    device: str = "cuda"  # "cuda" or "cpu"
    element_bytes: int  # of a trained element and of its gradient
    autocasts: bool = False  # operations of a step are in 16 bits
    offloads: bool = False  # to RAM, also where a device has no other memory
    states_on_disk: bool = False  # of the optimizer, then; and what the engine puts there besides
    room_bytes: int | None = None  # of the device, for all tensors of a process; None if unknown
    # elements of the parameters of each of the optimizer's groups, in its order; () if unknown
    trained: Callable[[], Sequence[Sequence[int]]] = lambda: ()
    state_bytes: Callable[[int], int]  # of the optimizer, for so many elements in one fp32 vector
    # what it allocates while it updates these: nothing, unless its kernel is written in Python
    update_bytes: Callable[[int], int] = lambda elements: 0


class Engine(Traits):
    """How processes share the work; these are the answers of a single process."""

    def problem(self, config: RunConfig) -> str | None:
        """Why a run cannot use it; None if it can."""
        optimizer = config.train.optimizer
        if self.states is None or self.states in OPTIMIZERS[optimizer].divided:
            return None
        able = [row.name for row in OPTIMIZERS.values() if self.states in row.divided]
        return (
            f"train.optimizer={optimizer} does not work with parallel.engine={self.name}, which supports "
            f"{' and '.join(able)}; use {'it' if len(able) == 1 else 'one of them'}, or "
            f"parallel.engine={WHOLE.name}"
        )

    def launch_flags(self) -> Mapping[str, Any]:
        """Further flags of `accelerate launch`."""
        return {}

    def prepare_launch(self) -> None:
        """Clears what an earlier run has left behind and would stop this one."""

    def while_starting(self, say: Callable[[str], None]) -> AbstractContextManager[None]:
        """A block in which a silence of minutes is explained beforehand, on the main rank."""
        return nullcontext()

    def trainer_arguments(
        self, config: RunConfig, plan: Plan, *, trained_parameters: int, shared: bool
    ) -> dict[str, Any]:
        """What the library's trainer is told of the engine; `shared`: all machines see the run directory."""
        return {}

    def divide(self, units: Sequence[Any], config: RunConfig, plan: Plan) -> None:
        """Leaves each process its part of the model, in place; imports torch.

        The units are on the CPU, the whole model last (`model.architecture.shape.units_of`).
        """

    def alone(self) -> AbstractContextManager[None]:
        """A block in which a process that no launcher has started is the only one of a group."""
        return nullcontext()

    def computing(self, model: object) -> AbstractContextManager[None]:
        """A block in which a divided model, not wrapped, computes although no training wraps it."""
        return nullcontext()

    def let_go(self, model: object) -> None:
        """Undoes what training has made of a model, wrapped or not, so that another one can begin."""

    def backward_arguments(self) -> dict[str, bool]:
        """For the backward pass of a loss that is divided by the number of micro-batches already."""
        return {}

    def updated(self, model: object) -> bool:
        """Whether weights have been updated before the norm of the gradients was known.

        The model is as the engine wrapped it, in a step whose gradients are not finite.
        """
        return False

    def state_files(self, checkpoint: Path) -> list[Path]:
        """The files of the optimizer's state in a checkpoint, in the order of the ranks that saved them."""
        return [file for file in [checkpoint / "optimizer.pt"] if file.is_file()]

    def save_state(self, optimizer: object, model: object, checkpoint: Path) -> bool:
        """Writes this process's part of the optimizer's state; all processes call it, nothing wrapped.

        False: nothing was written, the trainer's library does it.
        """
        return False

    def read_state(self, checkpoint: Path, names: Sequence[str], load: "Load") -> "StateOf":
        """AdamW's state and the weights, as this engine saved them; imports torch.

        `names` are the trained parameters', in the optimizer's order; `load` reads a file of tensors.
        """
        from sft_play.engines.state import read_whole

        return read_whole(checkpoint, names, load)

    def trained_by(self, optimizer: Any) -> list[Any]:
        """The parameters that an optimizer updates, in its order; without accelerate's wrapper."""
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def set_state(self, optimizer: object, parameters: Mapping[str, Any], state_of: "StateOf") -> None:
        """Sets weights and AdamW's state of these parameters, by name; imports torch."""
        from sft_play.engines.state import set_whole

        set_whole(optimizer, parameters, state_of)

    def load_weights(self, model: object, checkpoint: Path) -> bool:
        """Sets the trained weights to those of a checkpoint; all processes call it, the model not wrapped.

        False: nothing was set, the trainer's library does it.
        """
        return False

    def go_on_from(self, model: object, step: int) -> None:
        """Tells the engine, of a model that it wrapped, how many steps are done, once its state was set."""

    def complete_checkpoint(self, checkpoint: Path) -> None:
        """Adds what each machine needs in a folder of its own, if machines share no disk."""

    def full_weights(
        self, model: "Module", types: Mapping[str, "dtype"] = NOTHING_CAST
    ) -> dict[str, "Tensor"] | None:
        """The weights to save, gathered on the first process; all processes call it, the model not wrapped.

        `types` says, by name, which are saved in another type. None: they are the model's own.
        """
        from sft_play.engines.whole import as_it_is, whole_weights

        return whole_weights(model, as_it_is, types) if types else None

    def classes_of_state(self) -> list[Any]:
        """Classes in the saved optimizer state, besides tensors and plain values."""
        return []

    def state_on_disk(self, elements: int, state_bytes: int) -> int:
        """Bytes of the saved state of an optimizer that keeps `state_bytes` for so many trained elements."""
        return state_bytes

    def transform(self, step: Step, division: Division) -> Step:
        """The step of one process among several, from that of a single process.

        Its blocks are as large as the allocator makes them. If the engine distributes, gradients are live
        from the start.
        """
        return step

    def saved_from_memory(self, terms: Mapping[str, int]) -> dict[str, int]:
        """What is in memory while a checkpoint is saved: weights, states and what is never freed.

        `terms` is the breakdown of the forward pass, in bytes.
        """
        kept = {"weights", "adapters", "optimizer"} | ({"gradients"} if self.keeps_gradients else set())
        return {name: size if name in kept else 0 for name, size in terms.items()}

    def messages(self, work: Work, element_bytes: int, plan: Plan) -> tuple[Message, ...]:
        """What the processes exchange in an optimizer step, with gradients of so many bytes for an element.

        The work is of a micro-batch, with what is trained, and what is gathered if weights are divided.
        """
        return ()

    def moved_by_offload(self, work: Work, accumulation: int) -> tuple[float, float]:
        """Bytes that a step copies between GPU and RAM, and that the CPU reads and writes before its update.

        The work is of a micro-batch, of which each process has so many in a step.
        """
        sizes = (sum(work.exchanged(kind).elements()) for kind in (TRANSFER, IN_RAM))
        copied, summed = (float(accumulation * size) for size in sizes)
        return copied, summed

    def moved_by_disk(self, work: Work, accumulation: int, share: float) -> float:
        """Bytes that a step of a process reads from and writes to its mapped files: AdamW's two moments.

        As `moved_by_offload`; `share` is how much of what is trained it updates.
        """
        return 2 * 2 * FP32 * share * work.trained_elements

    def update_share(self, world_size: int) -> float:
        """The share of the trained elements that a process updates."""
        return 1 / world_size if self.shards_state else 1.0
