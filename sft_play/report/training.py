"""What to type to train by a plan."""

from collections.abc import Sequence
from pathlib import Path

from sft_play.engines.registry import engine_of
from sft_play.machine.catalogue import LARGEST_MACHINE
from sft_play.report.layout import make_command


def training_command(
    engine: str, world_size: int, config: str | Path = "", overrides: Sequence[str] = ()
) -> str:
    """The `make` command that trains with an engine on so many GPUs or processes, on machines of eight."""
    machines, rest = divmod(world_size, LARGEST_MACHINE)
    if machines > 1 and not rest:
        several = dict(NODES=machines, NGPU=LARGEST_MACHINE, ENGINE=engine)
        return make_command("train-slurm", config, overrides, **several)
    processes = world_size if world_size > 1 else None
    return make_command(engine_of(engine).target, config, overrides, NGPU=processes)
