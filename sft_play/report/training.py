"""What to type to train by a plan."""

from collections.abc import Sequence
from pathlib import Path

from sft_play.engines.registry import engine_of
from sft_play.machine.catalogue import LARGEST_MACHINE
from sft_play.plan import Plan
from sft_play.report.layout import make_command


def training_command(plan: Plan, config: str | Path = "", overrides: Sequence[str] = ()) -> str:
    """The `make` command that trains by a plan: on GPUs on machines of eight, on a CPU on this one."""
    sharing, engine = plan.sharing, engine_of(plan.sharing.engine)
    offload = None if sharing.offload == "none" else sharing.offload
    machines, rest = divmod(sharing.world_size, LARGEST_MACHINE)
    if plan.device != "cpu" and machines > 1 and not rest:
        several = dict(NODES=machines, NGPU=LARGEST_MACHINE, ENGINE=plan.sharing.engine, OFFLOAD=offload)
        return make_command("train-slurm", config, overrides, **several)
    processes = plan.sharing.world_size if engine.distributes else None
    return make_command(engine.target, config, overrides, NGPU=processes, OFFLOAD=offload)
