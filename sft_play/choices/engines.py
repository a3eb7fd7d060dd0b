"""The engines: how the processes of a run share the work, one row of traits each.

What they do is in `engines/`, in classes that the rows name.
"""

from dataclasses import dataclass
from typing import Literal

from sft_play.choices.optimizers import Divided


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What settings, planner, sizing and launcher know of an engine; the defaults are those of most."""

    name: str  # in plans and, unless it is a single process, in `parallel.engine`
    label: str
    code: str = ""  # module and class in `engines/`
    target: str = "train"  # of make, which trains with it
    principle: str = ""  # what it does to the memory of a process, for a sentence of the plan
    aliases: tuple[str, ...] = ()  # keys of other tools' configs that mean it
    accelerate: str = "ddp"  # the beginning of the names of its files in configs/accelerate
    distributed_type: str = "MULTI_GPU"  # of accelerate
    distributed_type_alone: str = "NO"  # the same if it offloads in one process
    packages: tuple[str, ...] = ()  # that it needs besides those of every run
    divides: Literal["", "nothing", "states", "weights"] = "nothing"  # among processes; "": there is one
    states: Divided | None = None  # how it divides the optimizer's
    automatic: bool = True  # `parallel.engine=auto` may choose it
    casts_model: bool = False  # to 16 bits, adapters too, instead of autocasting
    keeps_gradients: bool = False  # in buffers that are never freed
    offloads: tuple[str, ...] = ()  # values of `parallel.offload` besides none, also for one process
    weights_on_disk: bool = False  # with `parallel.nvme_path`, too
    replicates: bool = False  # each machine may divide a whole model among its processes
    regathers: bool = False  # also what belongs to no layer, for the backward pass
    wraps_shards: bool = False  # accelerate wraps a model that is divided already
    joins_trained: bool = False  # to one vector, so that all that is trained must have one type
    can_defer: bool = False  # gradients of divided weights may stay whole until a step's last micro-batch
    can_keep_gathered: bool = False  # weights may stay so from the forward to the backward pass
    compiles_layers: bool = True  # as `train.compile` asks for

    @property
    def distributes(self) -> bool:
        """Whether it is for several processes."""
        return bool(self.divides)

    @property
    def shards_state(self) -> bool:
        """Whether each process saves its part of the optimizer's state."""
        return self.divides in ("states", "weights")

    @property
    def shards_weights(self) -> bool:
        """Whether each process holds its part of the model."""
        return self.divides == "weights"

    @property
    def trades_speed(self) -> bool:
        """Whether it is chosen only where no other one fits: it costs more time than the clock knows of."""
        return self.shards_state

    @property
    def loads_own_state(self) -> bool:
        """Whether the trainer's library does, if it was saved by as many processes."""
        return not self.shards_weights

    @property
    def makes_gradients_early(self) -> bool:
        """Whether a first micro-batch finds gradients: in buffers, where each process has all of them."""
        return self.distributes and not self.shards_weights


# The preferred one first.
TRAITS = {
    row.name: row
    for row in (
        Traits(
            name="none",
            label="one process",
            code="base:Engine",
            accelerate="single_gpu",
            distributed_type="NO",
            divides="",
        ),
        Traits(
            name="ddp",
            label="DDP",
            code="ddp:Ddp",
            target="train-distributed",
            principle="each process holds the whole model, so more processes do not lower the peak",
            keeps_gradients=True,
        ),
        Traits(
            name="deepspeed_z2",
            label="ZeRO-2",
            code="zero2:Zero2",
            target="train-deepspeed",
            principle="partitions optimizer states and gradients",
            aliases=("deepspeed",),
            accelerate="zero2",
            distributed_type="DEEPSPEED",
            packages=("deepspeed",),
            divides="states",
            states="joined",
            casts_model=True,
            compiles_layers=False,
            joins_trained=True,
        ),
        Traits(
            name="fsdp2",
            label="FSDP2",
            code="fsdp2:Fsdp2",
            target="train-fsdp",
            principle="divides weights, gradients and optimizer states among the processes",
            aliases=("fsdp",),
            divides="weights",
            states="cut",
            offloads=("ram",),
            replicates=True,
            can_defer=True,
            can_keep_gathered=True,
        ),
        Traits(
            name="deepspeed_z3",
            label="ZeRO-3",
            code="zero3:Zero3",
            target="train-deepspeed",
            principle="partitions weights, gradients and optimizer states among the processes",
            accelerate="zero3",
            distributed_type="DEEPSPEED",
            distributed_type_alone="DEEPSPEED",
            packages=("deepspeed",),
            divides="weights",
            states="cut",
            automatic=False,
            casts_model=True,
            compiles_layers=False,
            offloads=("ram",),
            weights_on_disk=True,
            regathers=True,
            wraps_shards=True,
            joins_trained=True,
        ),
    )
}
ALONE = TRAITS["none"]
SEVERAL = {name: row for name, row in TRAITS.items() if row.distributes}  # for several processes
WHOLE = next(iter(SEVERAL.values()))  # what works with all methods


def asked_for() -> str:
    """The sentences about `parallel.engine=auto` in the reference."""
    chosen = [row.label for row in SEVERAL.values() if row.automatic]
    never = [row.name for row in SEVERAL.values() if not row.automatic]
    return (
        f"auto: {chosen[0]}, or {' or '.join(chosen[1:])} if the memory it saves makes the run fit or train "
        f"faster. Only when set explicitly: {', '.join(never)}."
    )
