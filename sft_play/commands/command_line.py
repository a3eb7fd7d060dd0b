"""Decorators that make a function of the parsed arguments a command, with its flags; what commands share."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import RenderableType

from sft_play import __version__
from sft_play.errors import CheckpointError, ConfigError
from sft_play.report.layout import ending, header, make_command
from sft_play.runlog import RunDir
from sft_play.spelling import in_python, make, typed
from sft_play.ui.console import console
from sft_play.units import alternatives

if TYPE_CHECKING:
    from sft_play.config.load import ResolvedConfig
    from sft_play.config.schema import RunConfig

Handler = Callable[..., int]  # of Arguments, and of the flags of its command by their names


@dataclass(frozen=True)
class Arguments:
    """What was typed."""

    command: str
    handler: Handler
    flags: Mapping[str, Any]  # of this command, read by click
    prints: bool = False  # whether all that the command makes is what it prints
    json: bool = False
    config: str = ""  # "" without one
    overrides: tuple[str, ...] = ()

    def run(self) -> int:
        """Runs the command and returns its exit code."""
        return self.handler(self, **self.flags)


Decorator = Callable[[Handler], Handler]


GROUPS = {  # of the commands in `sft-play --help`
    "To start": ("demo", "init", "check", "plan"),
    "Data": ("prepare", "process", "style", "render", "dapt-docx"),
    "Training": ("probe", "train", "slurm", "tensorboard", "studio"),
    "After training": (
        "eval", "eval-lm", "infer", "merge", "merge-test", "export", "push", "report", "compare", "runs",
    ),
    "This machine": (
        "gpu-info", "memory-check", "device-profile", "setup-accelerate", "config-schema", "clean-cache",
    ),
}  # fmt: skip


INTERRUPTED_BY_USER = 130  # as shells report Ctrl-C
HELP = {"help_option_names": ["--help", "-h"]}  # of each command too: it may be called without PROGRAM


class _Grouped(click.Group):
    """Lists its commands in the order of a run, a section for each stage."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for names in GROUPS.values() for name in names]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(200)) for name in names])


PROGRAM = _Grouped(
    "sft-play",
    help="Plan, run and evaluate the fine-tuning of an LLM on the GPUs you have.",
    context_settings=HELP,
    epilog="""\b
Examples:
  sft-play demo                                    a whole run, without a GPU
  sft-play plan --model qwen3-8b --gpu "RTX 4090"  what fits, and how fast
  sft-play init                                    a config to start from
  sft-play train --config my.yaml train.epochs=1   with one setting overridden
\b
Completion in bash (or zsh, fish):
  eval "$(_SFT_PLAY_COMPLETE=bash_source sft-play)"
""",
)

click.version_option(__version__, message="%(prog)s %(version)s")(PROGRAM)


def command(
    name: str,
    *,
    config: bool = True,
    needs_config: bool = True,
    as_json: bool = False,
    prints: bool = False,
    examples: Sequence[str] = (),
) -> Decorator:
    """Makes a function a command; the first line of its docstring is the help text.

    With `config`, it takes --config, which it may need, and overrides; with `as_json`, it takes --json.
    `prints` says whether all it makes is what it prints. `examples` are its arguments, as typed.
    """

    def add(function: Handler) -> Handler:
        if as_json:
            switch("--json", "print a JSON object to stdout")(function)
        if config:
            where = "YAML config file; `sft-play init` writes one"
            flag("overrides", "settings to override", nargs=-1, metavar="[section.key=value]...")(function)
            flag("--config", where, required=needs_config, type=click.Path())(function)

        def parsed(
            config: str | None = None, overrides: tuple[str, ...] = (), json: bool = False, **flags: object
        ) -> Arguments:
            return Arguments(name, function, flags, prints, json, config or "", overrides)

        shown = "\n".join(["\b", "Examples:", *(f"  sft-play {name} {words}".rstrip() for words in examples)])
        parameters = function.__dict__.pop("__click_params__", [])[::-1]
        text = (function.__doc__ or name).splitlines()[0]
        epilog = shown if examples else None
        made = click.Command(
            name, HELP, callback=parsed, params=parameters, help=text, short_help=text, epilog=epilog
        )
        PROGRAM.add_command(made)
        return function

    return add


def flag(name: str, help: str, **settings: object) -> Decorator:
    """A flag of a command, or an argument if its name has no dashes; `settings` are those of click."""
    made: Any = click.option if name.startswith("-") else click.argument
    return made(name, help=help, **settings)


def switch(name: str, help: str) -> Decorator:
    """A flag without a value."""
    return flag(name, help, is_flag=True)


def number(
    name: str, setting: str, help: str, least: int, most: int | None = None, default: int | None = None
) -> Decorator:
    """A flag with a whole number, which was typed as this setting of make."""

    def read(_context: click.Context, _flag: click.Parameter, text: str | None) -> int | None:
        from sft_play.launch.nodes import whole_number

        return default if text is None else whole_number(typed(setting, name, text), text, least, most)

    return flag(name, help, callback=read, metavar="N")


def amount(name: str, setting: str, help: str, metavar: str) -> Decorator:
    """A flag with a number above 0, which was typed as this setting of make."""

    def read(_context: click.Context, _flag: click.Parameter, text: str | None) -> float | None:
        if text is None:
            return None
        try:
            found = float(text)
        except ValueError:
            found = 0.0
        if not 0 < found < float("inf"):
            raise ConfigError(f"{typed(setting, name, text)}: expected a number above 0")
        return found

    return flag(name, help, callback=read, metavar=metavar)


class _OneOf(click.Choice):
    """A choice whose error is a sentence about what was typed, without the usage of a command."""

    def __init__(self, name: str, setting: str, allowed: Sequence[str]) -> None:
        super().__init__(allowed)
        self.flag, self.setting = name, setting

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value in self.choices:
            return value
        expected = alternatives(self.choices)
        raise ConfigError(f"{typed(self.setting, self.flag, value)}: expected {expected}")


def choice(name: str, setting: str, help: str, allowed: Sequence[str]) -> Decorator:
    """A flag with one of several values, by default the first, which was typed as this setting of make."""
    return flag(name, help, type=_OneOf(name, setting, allowed), default=allowed[0])


def arguments(name: str, overrides: Sequence[str] = (), **flags: object) -> Arguments:
    """The arguments of a command as if its flags had been typed so; ConfigError if a value is wrong.

    `arguments("plan", model="qwen3-8b", why=True)` is that of `sft-play plan --model qwen3-8b --why`.
    """
    words = list(overrides)
    for flag_name, value in flags.items():
        if value is not None and value is not False:
            words += [f"--{flag_name.replace('_', '-')}", *([] if value is True else [str(value)])]
    try:
        with in_python():
            return PROGRAM.commands[name].main(words, prog_name=name, standalone_mode=False)
    except click.UsageError as error:
        raise ConfigError(error.format_message()) from None


def end(
    args: Arguments,
    result: object,
    *shown: RenderableType,
    then: Sequence[str] = (),
    run: RunDir | None = None,
    **settings: object,
) -> int:
    """Ends a command: prints its result, a JSON value, with --json, else what it shows a person; returns 0.

    `then` are make targets to run next: with what was typed and these `settings`, or for a trained `run`.
    """
    if args.json:
        sys.stdout.write(json.dumps(result, indent=2, default=str) + "\n")
    elif then:
        words: Any = dict(config=args.config, overrides=args.overrides, **settings)
        if run and run.config.exists():
            words = {"RUN": run.typed}
        console().print(*shown, ending({}, [make_command(target, **words) for target in then]))
    elif shown:
        console().print(*shown)
    return 0


def announce(args: Arguments, *lines: str, name: str = "", reads_rows: bool = False) -> "ResolvedConfig":
    """Prints the header of a command, before anything that takes a while; returns the config.

    With `reads_rows`, a model or data that is not there is an error now, not after libraries are loaded.
    """
    from sft_play.config.load import load_config

    resolved = load_config(args.config, args.overrides)
    console().print(header(name or args.command, resolved, *lines))
    if reads_rows:
        from sft_play.config.inputs import data_inputs
        from sft_play.data.sources import require_here
        from sft_play.model.weights.files import require_possible

        require_here(data_inputs(resolved.config.data))
        require_possible(resolved.config.model)
    return resolved


def loaded_config(args: Arguments) -> "RunConfig":
    """The config of a command, with its built-in data made."""
    from sft_play.builtin.demo import materialise
    from sft_play.config.load import load_config

    return materialise(load_config(args.config, args.overrides)).config


@contextmanager
def importing() -> Iterator[None]:
    """A live line while libraries are imported, which takes seconds."""
    from sft_play.machine.process import importing_libraries
    from sft_play.ui.progress import LIBRARIES, spinner

    with spinner(LIBRARIES), importing_libraries():
        yield


def finished_run(resolved: "ResolvedConfig") -> RunDir:
    """The run directory of a config; CheckpointError if it does not exist."""
    run = RunDir(Path(resolved.config.output.dir) / resolved.config.output.name)
    if not run.path.is_dir():
        named = resolved.origins["output.name"] == "override"
        named_so = {"RUN": run.path.name} if named else {}
        command = make("train", CONFIG=resolved.path, **named_so)
        raise CheckpointError(f"{run.path} does not exist; run `{command}` first")
    return run
