"""All engines, the preferred one first."""

from sft_play.config.schema import RunConfig
from sft_play.engines.base import Engine
from sft_play.engines.ddp import Ddp
from sft_play.engines.fsdp2 import Fsdp2
from sft_play.engines.zero2 import Zero2

ALONE = Engine()
ENGINES: list[Engine] = [ALONE, Ddp(), Zero2(), Fsdp2()]


def engine_of(name: str) -> Engine:
    """The engine with this name, as in a plan.

    Raises:
        KeyError: there is none.
    """
    return {engine.name: engine for engine in ENGINES}[name]


def label_of(name: str, replicas: int = 1) -> str:
    """The engine's name for people; of an engine that this version does not know, the name itself."""
    label = {engine.name: engine.label for engine in ENGINES}.get(name, name)
    return f"{label} hybrid" if replicas > 1 else label


def distributed_engines() -> list[Engine]:
    """Those that divide a run among several processes, the preferred one first."""
    return [engine for engine in ENGINES if engine.distributes]


def engines_for(config: RunConfig, world_size: int) -> list[Engine]:
    """The engines that a run may use, the preferred one first."""
    if world_size == 1:
        return [ALONE]
    asked = config.parallel.engine
    if asked != "auto":
        return [engine_of(asked)]
    return [engine for engine in distributed_engines() if not engine.problem(config)]
