"""All engines, the preferred one first."""

from importlib import import_module

from sft_play.choices.engines import TRAITS, Traits
from sft_play.config.conflicts import computes
from sft_play.config.schema import RunConfig
from sft_play.engines.base import Engine


def _engine(row: Traits) -> Engine:
    module, _, name = row.code.partition(":")
    return getattr(import_module(f"sft_play.engines.{module}"), name)(**vars(row))


ENGINES = [_engine(row) for row in TRAITS.values()]
ALONE = next(engine for engine in ENGINES if not engine.distributes)


def engine_of(name: str) -> Engine:
    """The engine with this name, as in a plan.

    Raises:
        KeyError: there is none.
    """
    return {engine.name: engine for engine in ENGINES}[name]


def label_of(name: str, replicas: int = 1, offload: str = "none") -> str:
    """The engine's name for people; of an engine that this version does not know, the name itself."""
    label = {engine.name: engine.label for engine in ENGINES}.get(name, name)
    label = f"{label} hybrid" if replicas > 1 else label
    return label if offload == "none" else f"{label} in {offload.upper()}"


def distributed_engines() -> list[Engine]:
    """Those that divide a run among several processes, the preferred one first."""
    return [engine for engine in ENGINES if engine.distributes]


def chosen_engines() -> list[Engine]:
    """Those of them that a plan chooses by itself, the preferred one first."""
    return [engine for engine in distributed_engines() if engine.automatic]


def engines_for(config: RunConfig, world_size: int, *, offload: bool = True) -> list[tuple[Engine, str]]:
    """The engines that a run may use, each with where it offloads to; the preferred ones first.

    `offload` says whether `parallel.offload=auto` may lead to it.
    """
    asked = config.parallel
    several = [engine_of(asked.engine)] if asked.engine not in ("auto", ALONE.name) else chosen_engines()
    possible = [engine for engine in several if asked.engine != "auto" or not engine.problem(config)]
    possible = [engine for engine in possible if computes(engine, config.train)]
    plain = [(engine, "none") for engine in ([ALONE] if world_size == 1 else possible)]
    away = [(engine, place) for engine in possible for place in engine.offloads]
    if asked.offload == "auto":
        return [*plain, *(away if offload else [])]
    return [(engine, place) for engine, place in [*plain, *away] if place == asked.offload]


def offload_problem(config: RunConfig, device: str, precision: str) -> str | None:
    """Why a run cannot offload as `parallel.offload` says, on a "cuda" or "cpu" device; None if it can.

    `precision` is the autocast type.
    """
    place, asked = config.parallel.offload, config.parallel.engine
    if config.parallel.nvme_path and place != "ram":
        return f"parallel.nvme_path needs parallel.offload=ram (found {place})"
    if place in ("auto", "none"):
        return None
    able = [engine.name for engine in distributed_engines() if place in engine.offloads]
    if asked != "auto" and asked not in able:
        return (
            f"parallel.offload={place} does not work with parallel.engine={asked}, only with "
            f"{' or '.join(able)}; set parallel.engine={able[0]}, or parallel.offload=none"
        )
    if problem := engine_of(able[0] if asked == "auto" else asked).problem(config):
        return f"parallel.offload={place}: {problem}"
    if config.parallel.defer_exchange is True:
        return (
            f"parallel.defer_exchange=true does not work with parallel.offload={place}, which moves "
            "gradients of each micro-batch to RAM; set parallel.defer_exchange=auto, or parallel.offload=none"
        )
    if device == "cuda" and precision == "fp16":
        return (
            f"parallel.offload={place} does not work with fp16 autocast, which scales gradients on the GPU; "
            "set train.mixed_precision=no, or parallel.offload=none"
        )
    return None
