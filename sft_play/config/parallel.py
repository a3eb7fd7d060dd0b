"""The settings of the parallel section: how processes work together."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from sft_play.choices.engines import SEVERAL, asked_for
from sft_play.config.section import Section
from sft_play.config.values import Auto, AutoOrAmount, AutoOrCount, Count, PathText


class ParallelConfig(Section):
    """How processes work together; their number is set at launch (NGPU=)."""

    engine: Literal["auto", *SEVERAL] = Field(  # type: ignore[valid-type]
        default="auto", description=asked_for()
    )
    offload: Literal["auto", "none", "ram"] = "auto"
    """ram: weights, gradients and the optimizer's states are in RAM, the GPU holds a layer at a time, and the
    CPU updates the weights; also on a single GPU. auto: only if nothing else fits."""
    reshard_after_forward: bool | Auto = "auto"
    """With FSDP2, true frees a layer's gathered weights after its forward pass and gathers them again for the
    backward pass; false keeps them, which sends less and takes memory for all weights. auto: false if that
    fits and is predicted to be faster."""
    defer_exchange: bool | Auto = "auto"
    """With FSDP2, true leaves gradients whole until the last micro-batch of a step and reduces them once;
    false, and offload=ram, reduce those of each. auto: true if that fits and is predicted to be faster. Sums
    are rounded otherwise, so a resumed run goes on as it began."""
    nvme_path: Annotated[PathText, Field(min_length=1)] | None = None
    """With offload=ram, a folder on a fast local disk for AdamW's moments, and with deepspeed_z3 for weights:
    not in RAM, but in files that each step reads and writes."""
    sequence_parallel_size: AutoOrCount = "auto"
    """Processes that divide the tokens of each micro-batch among them, and for attention its heads (Ulysses,
    arXiv 2309.14509), for rows that are too long for one GPU. It divides the processes of a machine and the
    attention heads of the model. auto: if nothing else fits, or if MLPs in tiles or RAM would take longer,
    the size that is predicted to be fastest; train.grad_accum has to be auto, too."""
    memory_gib: AutoOrAmount = "auto"
    """Memory limit per process in GiB: GPU memory including the CUDA context, or RAM without GPUs. auto: what
    is free."""
    timeout_s: Count = 600
    """Timeout for collectives in seconds; a run that exceeds it is terminated."""

    @property
    def sequence_ranks(self) -> int:
        """Processes that are to divide the tokens of a micro-batch; 1 if the plan decides it."""
        return 1 if self.sequence_parallel_size == "auto" else self.sequence_parallel_size

    @property
    def divides_tokens(self) -> bool:
        """Whether processes are to divide the tokens of a micro-batch, whatever the plan."""
        return self.sequence_ranks > 1

    def divided(self, count: int) -> int:
        """What a process has of so many tokens, or how many groups so many processes are."""
        return count // self.sequence_ranks

    @field_validator("offload", mode="before")
    @classmethod
    def _not_to_disk(cls, place: object) -> Any:
        if place in ("nvme", "disk"):
            raise ValueError(
                f"{place} is no place for all of it; set offload=ram, and for the optimizer's states "
                "nvme_path=<folder on the disk>"
            )
        return place
