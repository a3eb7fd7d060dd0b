"""The settings of the parallel section: how processes work together."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from sft_play.choices.engines import SEVERAL, asked_for
from sft_play.config.section import Section
from sft_play.config.values import Auto, AutoOrAmount, AutoOrCount, Count, PathText
from sft_play.spelling import var


class ParallelConfig(Section):
    """How processes work together; their number is set at launch (NGPU=)."""

    engine: Literal["auto", *SEVERAL] = Field(  # type: ignore[valid-type]
        default="auto", description=asked_for()
    )
    offload: Literal["auto", "none", "ram"] = "auto"
    """ram: weights, gradients and optimizer states stay in RAM, the GPU holds one layer at a time, and the
    CPU updates the weights; works on a single GPU, too. auto: only if nothing else fits."""
    reshard_after_forward: bool | Auto = "auto"
    """With FSDP2, true frees a layer's gathered weights after its forward pass and gathers them again; false
    keeps them, which sends less but needs memory for all weights. auto: false if that fits and is predicted
    to be faster."""
    defer_exchange: bool | Auto = "auto"
    """With FSDP2, true accumulates whole gradients and reduces them once per step; false, and offload=ram,
    reduce them after each micro-batch. auto: true if that fits and is predicted to be faster."""
    nvme_path: Annotated[PathText, Field(min_length=1)] | None = None
    """With offload=ram, a folder on a fast local disk: AdamW's moments, and with deepspeed_z3 also weights,
    are kept in files there instead of in RAM."""
    sequence_parallel_size: AutoOrCount = "auto"
    """Number of processes that share the tokens of each micro-batch, and in attention its heads (Ulysses,
    arXiv 2309.14509), for rows that are too long for one GPU. It must divide both the processes of a
    machine and the attention heads of the model. auto: 1, unless nothing else fits or tiled MLPs or
    offloading would be slower; then the size predicted to be fastest, if train.grad_accum is auto, too."""
    memory_gib: AutoOrAmount = "auto"
    """Memory limit per process in GiB: GPU memory including the CUDA context, or RAM without GPUs. auto:
    what is free."""
    timeout_s: Count = 600
    """Seconds that processes wait for each other; a run that exceeds it is terminated. While a checkpoint is
    written, as long as a disk of 100 MB/s takes, if that is longer."""

    @property
    def sequence_ranks(self) -> int:
        """Processes that are to divide the tokens of a micro-batch; 1 if the plan decides it."""
        return 1 if self.sequence_parallel_size == "auto" else self.sequence_parallel_size

    @property
    def sequence_parallel(self) -> bool:
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
                f"{place} cannot hold everything; set {var(OFFLOAD='ram')}, and to keep optimizer states on "
                "disk, parallel.nvme_path=<folder on the disk>"
            )
        return place
