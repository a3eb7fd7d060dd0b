"""What all commands share on the screen: the header before the work, and the paths and commands after it."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from sft_play.config.load import ResolvedConfig
from sft_play.config.schema import RunConfig
from sft_play.screen import Facts, Words

EIGHTHS = " ▏▎▍▌▋▊▉"
METHODS = {"full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}


def header(command: str, resolved: ResolvedConfig, *lines: str) -> RenderableType:
    """What a command is about to do, on which run.

    Args:
        command: its name.
        resolved: config of the run.
        lines: what it will do; default: what the run trains.
    """
    title = Text.assemble((f"{command} {resolved.config.output.name}", "bold"), f"  {resolved.path}")
    texts = lines or (subject(resolved.config),)
    return Group(Words(title), *(Words(Text(f"  {text}", style="dim")) for text in texts), "")


def subject(config: RunConfig) -> str:
    """What a run trains, on what, and where its results go."""
    what = f"{METHODS[config.tuning.mode]} of {config.model.name} on {config.data.train_path}"
    return f"{what}, results in {config.output.dir}/{config.output.name}"


def columns(*names: str) -> Table:
    """A table without rules: text on the left in the first column, numbers on the right in the others."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for index, name in enumerate(names):
        table.add_column(name, justify="right" if index else "left")
    return table


def bullets(sentences: Iterable[str]) -> RenderableType:
    """A list of sentences with a hanging indent."""
    return Group(*(Words(f"  - {sentence}", hang=2) for sentence in sentences))


class Bar:
    """A share of a whole as a bar; made of # on screens that have ASCII alone."""

    def __init__(self, share: float, width: int = 12) -> None:
        self.share, self.width = min(1.0, max(0.0, share)), width

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        whole, rest = divmod(round(self.share * self.width * len(EIGHTHS)), len(EIGHTHS))
        full, part = ("#", "") if options.ascii_only else ("█", EIGHTHS[rest].strip())
        yield Text((full * whole + part).ljust(self.width))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(self.width, self.width)


def ending(places: Mapping[str, Any], commands: Sequence[str]) -> Facts:
    """The last lines of a command: where its outputs are, and what to run next."""
    rows: list[tuple[str, str | Text]] = [(name, str(path)) for name, path in places.items()]
    for index, command in enumerate(commands):
        rows.append(("" if index else "next", Text(command, style="bold cyan")))
    return Facts(rows)


def make_command(target: str, config: str | Path, overrides: Sequence[str] = ()) -> str:
    """The `make` command for a config and overrides, quoted for a shell."""
    arguments = f" ARGS={shlex.quote(shlex.join(overrides))}" if overrides else ""
    return f"make {target} CONFIG={shlex.quote(str(config))}{arguments}"
