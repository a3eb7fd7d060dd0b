"""What the functions of all commands share: the config, the header, JSON, the commands to run next."""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sft_play.errors import CheckpointError


def print_json(value: Any) -> None:
    """Prints a value as indented JSON on stdout."""
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")


def load_resolved(args: argparse.Namespace) -> Any:
    """The config of a command, with its built-in data made."""
    from sft_play.job import load_job_config

    return load_job_config(args.config, args.overrides)


def announce(args: argparse.Namespace, *lines: str, command: str = "") -> Any:
    """Prints the header of a command, before anything that takes a while; returns the config."""
    from sft_play.config.load import load_config
    from sft_play.report.layout import header
    from sft_play.runlog import console

    resolved = load_config(args.config, args.overrides)
    console().print(header(command or args.command, resolved, *lines))
    return resolved


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """A live line while libraries are imported, which takes seconds."""
    from sft_play.machine.process import importing_libraries
    from sft_play.report.progress import LIBRARIES, spinner

    with spinner(LIBRARIES), importing_libraries():
        yield


def say_next(args: argparse.Namespace, *targets: str, run: Any = None, apart: bool = True) -> None:
    """Prints the commands to run next, for the same run.

    Args:
        args: of this command.
        targets: make targets.
        run: a run that has been trained: its own config has the overrides that were typed.
        apart: from what is above.
    """
    from sft_play.report.layout import ending, make_command
    from sft_play.runlog import console

    if not args.json:
        config, overrides = args.config, args.overrides
        if run and overrides and run.config.exists():
            config, overrides = run.config, ()
        commands = [make_command(target, config, overrides) for target in targets]
        console().print(*([""] if apart else []), ending({}, commands))


def finished_run(resolved: Any) -> Any:
    """The run directory of a config.

    Raises:
        CheckpointError: it does not exist.
    """
    from sft_play.runlog import RunDir

    run = RunDir(Path(resolved.config.output.dir) / resolved.config.output.name)
    if not run.path.is_dir():
        named = resolved.origins["output.name"] == "override"
        command = f"make train CONFIG={resolved.path}{f' RUN={run.path.name}' if named else ''}"
        raise CheckpointError(f"{run.path} does not exist; run `{command}` first")
    return run
