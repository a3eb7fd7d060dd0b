"""Decorators that make a function of the parsed arguments a command, with its flags; what commands share."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_play.errors import CheckpointError, ConfigError
from sft_play.report.layout import ending, header, make_command
from sft_play.runlog import RunDir, console

if TYPE_CHECKING:
    from sft_play.config.load import ResolvedConfig
    from sft_play.config.schema import RunConfig

Handler = Callable[[argparse.Namespace], int]
Decorator = Callable[[Handler], Handler]
Flag = tuple[str, dict[str, Any]]  # a name, and further arguments of argparse's `add_argument`


@dataclass(frozen=True)
class Command:
    """What the parser needs to know."""

    function: Handler
    flags: list[Flag]
    prints: bool


COMMANDS: dict[str, Command] = {}  # in the order of --help
_flags: dict[Handler, list[Flag]] = {}  # while the decorators of a function are applied, the last one first


def command(
    name: str, *, config: bool = True, needs_config: bool = True, as_json: bool = False, prints: bool = False
) -> Decorator:
    """Makes a function a command; the first line of its docstring is the help text.

    With `config`, it takes --config, which it may need, and overrides; with `as_json`, it takes --json.
    `prints` says whether all it makes is what it prints.
    """

    def add(function: Handler) -> Handler:
        if as_json:
            switch("--json", "print a JSON object to stdout")(function)
        if config:
            flag("overrides", "config values to override", nargs="*", metavar="section.key=value")(function)
            flag("--config", "YAML config file", required=needs_config)(function)
        COMMANDS[name] = Command(function, _flags.pop(function, [])[::-1], prints)
        return function

    return add


def flag(name: str, help: str, **settings: Any) -> Decorator:
    """A flag of a command; `settings` are further arguments of argparse's `add_argument`."""

    def add(function: Handler) -> Handler:
        _flags.setdefault(function, []).append((name, {"help": help, **settings}))
        return function

    return add


def switch(name: str, help: str) -> Decorator:
    """A flag without a value."""
    return flag(name, help, action="store_true")


def number(
    name: str, setting: str, help: str, least: int, most: int | None = None, default: int | None = None
) -> Decorator:
    """A flag with a whole number, which was typed as this setting of make."""

    def read(text: str) -> int:
        from sft_play.launch.nodes import whole_number

        try:
            return whole_number(setting, text, least, most)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return flag(name, help, type=read, metavar="N", default=default)


def amount(name: str, setting: str, help: str, metavar: str) -> Decorator:
    """A flag with a number above 0, which was typed as this setting of make."""

    def read(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = 0.0
        if not 0 < found < float("inf"):
            raise argparse.ArgumentTypeError(f"{setting}={text}: expected a number above 0")
        return found

    return flag(name, help, type=read, metavar=metavar)


def end(
    args: argparse.Namespace, result: Any, *shown: Any, then: Sequence[str] = (), run: RunDir | None = None
) -> int:
    """Ends a command: prints its result, a JSON value, with --json, else what it shows a person; returns 0.

    `then` are make targets to run next, for the same run: with the typed overrides, or those that the config
    of a trained `run` has.
    """
    if args.json:
        sys.stdout.write(json.dumps(result, indent=2, default=str) + "\n")
    elif then:
        config, overrides = args.config, args.overrides
        if run and overrides and run.config.exists():
            config, overrides = run.config, ()
        console().print(*shown, ending({}, [make_command(target, config, overrides) for target in then]))
    elif shown:
        console().print(*shown)
    return 0


def announce(args: argparse.Namespace, *lines: str, name: str = "") -> "ResolvedConfig":
    """Prints the header of a command, before anything that takes a while; returns the config."""
    from sft_play.config.load import load_config

    resolved = load_config(args.config, args.overrides)
    console().print(header(name or args.command, resolved, *lines))
    return resolved


def loaded_config(args: argparse.Namespace) -> "RunConfig":
    """The config of a command, with its built-in data made."""
    from sft_play.builtin.demo import materialise
    from sft_play.config.load import load_config

    return materialise(load_config(args.config, args.overrides)).config


@contextmanager
def importing() -> Iterator[None]:
    """A live line while libraries are imported, which takes seconds."""
    from sft_play.machine.process import importing_libraries
    from sft_play.report.progress import LIBRARIES, spinner

    with spinner(LIBRARIES), importing_libraries():
        yield


def finished_run(resolved: "ResolvedConfig") -> RunDir:
    """The run directory of a config; CheckpointError if it does not exist."""
    run = RunDir(Path(resolved.config.output.dir) / resolved.config.output.name)
    if not run.path.is_dir():
        named = resolved.origins["output.name"] == "override"
        command = f"make train CONFIG={resolved.path}{f' RUN={run.path.name}' if named else ''}"
        raise CheckpointError(f"{run.path} does not exist; run `{command}` first")
    return run
