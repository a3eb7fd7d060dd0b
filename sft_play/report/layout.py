"""What all commands share on the screen: the header before the work, and the paths and commands after it."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from sft_play.config.methods import METHODS
from sft_play.engines.registry import engine_of
from sft_play.plan import Plan
from sft_play.spelling import make
from sft_play.ui.screen import LEAST_NAMES, Command, NamedValues, Words

if TYPE_CHECKING:
    from sft_play.config.load import ResolvedConfig
    from sft_play.config.schema import RunConfig


def header(command: str, resolved: "ResolvedConfig", *lines: str) -> RenderableType:
    """What a command is about to do, on which run; by default, what the run trains."""
    title = Text.assemble((f"{command} {resolved.config.output.name}", "bold"), f"  {resolved.path}")
    texts = lines or (subject(resolved.config), *_caution(resolved.config))
    return Group(Words(title), *(Words(Text(f"  {text}", style="dim")) for text in texts), "")


def _caution(config: "RunConfig") -> tuple[str, ...]:
    """What to know before such a run."""
    from sft_play.config.inputs import BUILTINS, asked_name

    noise = "builtin:tiny has random weights: the run shows speed and memory, and its answers will be noise"
    return (noise,) if asked_name(config.model.name) == BUILTINS["tiny"] else ()


def subject(config: "RunConfig") -> str:
    """What a run trains, on what, and where its results go."""
    from sft_play.config.inputs import asked_name, training_paths

    data = ", ".join(map(asked_name, training_paths(config.data)))
    what = f"{METHODS[config.tuning.mode]} of {asked_name(config.model.name)} on {data}"
    return f"{what}, results in {config.output.dir}/{config.output.name}"


def apart(*parts: RenderableType) -> RenderableType:
    """The parts with a blank line between them."""
    spaced: list[RenderableType] = []
    for part in parts:
        spaced += ["", part] if spaced else [part]
    return Group(*spaced)


def bullets(sentences: Iterable[str]) -> RenderableType:
    """A list of sentences with a hanging indent."""
    return Group(*(Words(f"  - {sentence}", hang=2) for sentence in sentences))


def ending(places: Mapping[str, Any], commands: Sequence[str]) -> RenderableType:
    """The last lines of a command: where its outputs are, and what to run next."""
    lines = []
    for index, command in enumerate(commands):
        name = ("" if index else "next").ljust(LEAST_NAMES + 2)
        text = Text.assemble((name, "dim"), (command, "bold cyan"))
        lines.append(Command(text, hang=0 if index else len(name)))
    return Group(NamedValues((name, str(path)) for name, path in places.items()), *lines)


def stopped(what: str, command: str) -> RenderableType:
    """The last lines of a plan that was interrupted: what had been done, and what continues from there."""
    said = f"Stopped: {what}. What was found is kept; the same command continues from there."
    return Group(Words(said), ending({}, [command]))


def make_command(
    target: str, config: str | Path = "", overrides: Sequence[str] = (), **settings: object
) -> str:
    """The command of a `make` target for a config ("": none) and overrides, as typed, quoted for a shell.

    `settings` are further variables of make, which come first; those without a value are left out.
    """
    return make(target, **make_settings(config, overrides, **settings))


def make_settings(config: str | Path, overrides: Sequence[str], **settings: object) -> dict[str, str]:
    """The settings of a `make` command, quoted for a shell; arguments as in `make_command`."""
    words = {name: shlex.quote(str(value)) for name, value in settings.items() if value}
    words |= {"CONFIG": shlex.quote(str(config))} if config else {}
    return words | ({"ARGS": shlex.join(overrides)} if overrides else {})


def training_command(plan: Plan, config: str | Path = "", overrides: Sequence[str] = ()) -> str:
    """The `make` command that trains by a plan: by SLURM if it is for several machines."""
    sharing, engine = plan.sharing, engine_of(plan.sharing.engine)
    offload = None if sharing.offload == "none" else sharing.offload
    if sharing.machines > 1:
        each = sharing.world_size // sharing.machines
        several = dict(NODES=sharing.machines, NGPU=each, ENGINE=sharing.engine, OFFLOAD=offload)
        return make_command("train-slurm", config, overrides, **several)
    processes = plan.sharing.world_size if engine.distributes else None
    return make_command(engine.target, config, overrides, NGPU=processes, OFFLOAD=offload)
