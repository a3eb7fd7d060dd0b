"""ZeRO-2 of DeepSpeed: optimizer states, fp32 weights and gradients are partitioned among the processes.

After stage_1_and_2.py of DeepSpeed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_play.choices.engines import WHOLE
from sft_play.choices.optimizers import DEFAULT, OPTIMIZERS
from sft_play.config.schema import RunConfig
from sft_play.engines import deepspeed
from sft_play.engines.base import FP32, Division, Message, by_rank
from sft_play.engines.zero import Zero
from sft_play.errors import ConfigError
from sft_play.plan import Plan
from sft_play.timeline import PHASES, TERMS, Buffer, Place, Step
from sft_play.units import counted
from sft_play.work import Work

if TYPE_CHECKING:
    from sft_play.engines.state import Load, StateOf

NORM = 8  # bytes of an element for the norm of gradients
ALIGNMENT = 2  # elements, of each part


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """The settings of ZeRO-2's communication."""

    elements: int = 500_000_000  # DeepSpeed's default
    overlap: bool = True

    @classmethod
    def shipped(cls) -> "Buckets":
        """Those that a run has."""
        zero = deepspeed.configuration(2)["zero_optimization"]
        return cls(elements=zero["reduce_bucket_size"], overlap=zero["overlap_comm"])

    def bytes(self, trained_elements: int, element_bytes: int) -> int:
        """Bytes of the buffers that collect gradients; overlapping communication needs a second one.

        If all gradients fit into one bucket, they are reduced at the end of the backward pass and there is
        nothing to overlap with, so `deepspeed.configuration` turns overlapping off.
        """
        overlaps = self.overlap and self.elements < trained_elements
        return (2 if overlaps else 1) * element_bytes * min(self.elements, trained_elements)


@dataclass
class Part:
    """What one process has of all groups of parameters, each of which DeepSpeed cuts into equal parts.

    A tensor on the border of two parts is kept whole by both processes until the optimizer step.
    """

    sizes: list[int]  # elements of each group, padded to the same number in all processes
    whole: int = 0  # elements of all tensors that are in it, if only in part
    largest: int = 0  # elements of the largest piece of a tensor in it


def parts_of(groups: Sequence[Sequence[int]], processes: int) -> list[Part]:
    """The part of each process, of groups of parameters in the optimizer's order, by their elements."""
    sizes = [-(-sum(group) // (ALIGNMENT * processes)) * ALIGNMENT for group in groups if sum(group)]
    parts = [Part(sizes) for _ in range(processes)]
    for group, size in zip(filter(sum, groups), sizes, strict=True):
        start = 0
        for elements in group:
            stop = start + elements
            for rank in range(start // size, -(-stop // size)):
                piece = min(stop, (rank + 1) * size) - max(start, rank * size)
                parts[rank].whole += elements
                parts[rank].largest = max(parts[rank].largest, piece)
            start = stop
    return parts


def _flat_copy(step: Step, flat: int, division: Division) -> int:
    """Bytes of the flat buffer beside the parameters that go into it; they are freed before there are states.

    DeepSpeed takes what it copies to RAM if the device has no room for both (stage_1_and_2.py).
    """
    loaded = step.bytes_of("weights") + step.bytes_of("adapters")
    return 0 if division.room_bytes is not None and loaded + flat > division.room_bytes else flat


def _without_updates(step: Step) -> Step:
    """The step without what an update of one tensor after the other allocates."""
    line, sizes = step.timeline, step.sizes.copy()
    allocations = (line.phases == PHASES.index("optimizer")) & (line.events > 0)
    traced = line.source[line.events[allocations] - 1]
    sizes[traced[line.terms[traced] == TERMS.index("temporaries")]] = 0
    return replace(step, sizes=sizes)


def _updating(part: Part, held: int, division: Division, *, in_fp32: bool) -> int:
    """The most bytes beside the gradients `held` in the optimizer step of the process that has this part.

    First the norm of each gradient is taken. Then each group's gradients are flattened and cast to fp32, and
    its vector is updated at once; those of all groups are held until the last group's are flat. In fp32 they
    are flat from the beginning.
    """
    most, cast = NORM * part.largest, division.element_bytes != FP32
    for group, size in enumerate(part.sizes, start=1):
        updated = division.update_bytes(size)
        if not in_fp32:
            flattened = (division.element_bytes + FP32 * cast) * size
            updated = max(flattened, FP32 * size + updated - held * (group == len(part.sizes)))
        most = max(most, updated)
    return most


class Zero2(Zero):
    """DeepSpeed's ZeRO, stage 2."""

    stage = 2

    def trainer_arguments(
        self, config: RunConfig, plan: Plan, *, trained_parameters: int, shared: bool
    ) -> dict[str, Any]:
        """The DeepSpeed config.

        Raises:
            ConfigError: bitsandbytes cannot count the elements of a process, which it updates at once.
        """
        name, most = config.train.optimizer, 2**31 - 1  # its kernels take a 32-bit number (0.50)
        share = -(-trained_parameters // plan.sharing.world_size)
        if OPTIMIZERS[name].package == "bitsandbytes" and share > most:
            raise ConfigError(
                f"train.optimizer={name} updates at most {most:,} elements at once, and with {self.label} on "
                f"{counted(plan.sharing.world_size, 'process')} each has {share:,} of what is trained: use "
                f"at least {-(-trained_parameters // most)} processes, train.optimizer={DEFAULT}, or "
                f"parallel.engine={WHOLE.name}"
            )
        return super().trainer_arguments(config, plan, trained_parameters=trained_parameters, shared=shared)

    def state_files(self, checkpoint: Path) -> list[Path]:
        """One file for each rank that saved it."""
        return by_rank(checkpoint.glob("global_step*/*zero_pp_rank_*_optim_states.pt"))

    def read_state(self, checkpoint: Path, names: Sequence[str], load: "Load") -> "StateOf":
        """Joins the parts of all ranks."""
        from sft_play.engines.zero2_state import read_parts

        return read_parts(self.state_files(checkpoint), load)

    def trained_by(self, optimizer: Any) -> list[Any]:
        """DeepSpeed's own optimizer has one vector for each group in place of the parameters."""
        return [parameter for group in optimizer.bit16_groups for parameter in group]

    def set_state(self, optimizer: object, parameters: Mapping[str, Any], state_of: "StateOf") -> None:
        """DeepSpeed takes this rank's part of each parameter."""
        from sft_play.engines.zero2_state import set_part

        set_part(optimizer, parameters, state_of)

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

    def transform(self, step: Step, division: Division) -> Step:
        """Puts this process's part in the place of optimizer states and gradients, and adds the buffers.

        All trained parameters are copied into one flat buffer while the model is loaded, which a GPU without
        room for it gets from RAM. From then on a process has fp32 weights and states of its part. Gradients
        are moved into a bucket, which is there from the first one on and flattened once more to be reduced.
        Those of the part are kept, beside those of earlier micro-batches, and tensors on its borders whole.
        Without autocast, DeepSpeed takes the run for one in fp32: it reduces gradients in fp32 whatever the
        weights are, and keeps the part alone.
        """
        element, accumulates = division.element_bytes, division.accumulates
        gradients = (step.sizes_of("gradients") // element).tolist()
        elements = sum(gradients)
        parts = parts_of(division.trained() or [gradients], division.world_size)
        share = sum(parts[0].sizes)
        states = FP32 * share + division.state_bytes(share)
        copied = max(0, _flat_copy(step, elements * element, division) - states)
        in_fp32 = not division.autocasts and element != FP32
        own_of = [FP32 * share if in_fp32 else element * part.whole for part in parts]
        own = max(own_of)
        buckets = Buckets.shipped()
        # all in one bucket is reduced at the end; else, the last process begins to keep its part at once
        at_end = elements <= buckets.elements
        reducing: Place = "end" if at_end else "gradients"
        reduced = (element + FP32 * in_fp32) * min(elements, buckets.elements)
        beside = own * (accumulates and not at_end and not in_fp32)  # to be added to earlier ones
        if at_end and not accumulates and not in_fp32:
            reduced -= own  # which is kept when that is freed
        first: str = "forward" if accumulates else "backward"
        place: Place = "begin" if accumulates else reducing
        updating = max(
            held + _updating(part, held, division, in_fp32=in_fp32)
            for part, held in zip(parts, own_of, strict=True)
        )
        return (
            _without_updates(step)
            .without("optimizer", "gradients")
            .with_buffers(
                Buffer("optimizer", states, "load", None),
                Buffer("engine", copied, "load", "load"),
                Buffer("gradients", own, first, "optimizer", place),
                Buffer("gradients", beside, "backward", "backward", reducing),
                Buffer("engine", reduced, "backward", "backward", reducing),
                Buffer("engine", buckets.bytes(elements, element), "backward", "backward", "gradients"),
                Buffer("engine", updating - own, "optimizer", "optimizer"),
            )
        )

    def messages(self, work: Work, element_bytes: int, plan: Plan) -> tuple[Message, ...]:
        """Gradients of each micro-batch are reduced, and the updated weights gathered once.

        Although each process keeps only its part, all get the whole (`use_multi_rank_bucket_allreduce`).
        """
        gradient_bytes = work.trained_elements * element_bytes
        return (
            Message("all_reduce", gradient_bytes, plan.batch.accumulation),
            Message("all_gather", gradient_bytes, 1),
        )
