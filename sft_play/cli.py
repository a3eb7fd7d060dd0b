"""From the command line to a function of handlers.py or data_handlers.py, from an error to an exit code."""

import argparse
import contextlib
import errno
import logging
import os
import shlex
import sys
import traceback
from typing import NoReturn

from rich.text import Text

from sft_play import __version__
from sft_play.commands import data_handlers, handlers  # noqa: F401 - they declare the commands
from sft_play.commands.command_line import COMMANDS
from sft_play.errors import ConfigError, Interrupted, SftPlayError
from sft_play.launch.environment import settle_environment
from sft_play.runlog import console_on_stderr
from sft_play.screen import Command, Screen
from sft_play.secrets import redact
from sft_play.streams import require_output, secure_streams

INTERRUPTED_BY_USER = 130  # as shells report Ctrl-C
WITHOUT_DOCSTRINGS = (
    "PYTHONOPTIMIZE=2 (python -OO) removes the docstrings that transformers reads; unset it, or set it to 1"
)
# How OpenMP's threads wait for the next operation: they spin for a moment, and then sleep. How long is a
# compromise between an idle CPU and a shared one (benchmarks/results/thread_waiting_cpu.json). The policy is
# for other libraries than libgomp.
WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "6000"}


class _Parser(argparse.ArgumentParser):
    """argparse's parser, whose errors look like all others."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        _write_error(message, label=f"{self.prog}: error: ")
        self.exit(2)


def build_parser() -> argparse.ArgumentParser:
    """All commands and flags."""
    parser = _Parser(
        prog="sft-play",
        description="Plan, run and evaluate the fine-tuning of an LLM on the GPUs you have.",
    )
    parser.add_argument("--version", action="version", version=f"sft-play {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, command in COMMANDS.items():
        text = (command.function.__doc__ or "").splitlines()[0]
        added = subparsers.add_parser(name, help=text, description=text)
        added.set_defaults(function=command.function, json=False, prints=command.prints)
        for flag, settings in command.flags:
            added.add_argument(flag, **settings)
    return parser


def set_environment(*, rank: bool = False) -> None:
    """Library settings that must be set before the libraries are imported; `rank`: in a rank of a run."""
    settle_environment(os.environ, rank=rank)
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # otherwise TRL reports every run
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # prepare() forks processes
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "warning")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # names a package that nobody needs here
    if not WAITING.keys() & os.environ.keys():
        os.environ.update(WAITING)
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # GPU numbers match nvidia-smi and gpu-info


def exit_code_of(error: BaseException) -> int:
    """The exit code of an error; 1 means a bug in SFT-Play."""
    if isinstance(error, SftPlayError):
        return error.exit_code
    return INTERRUPTED_BY_USER if isinstance(error, KeyboardInterrupt) else 1


def report_error(error: BaseException) -> int:
    """Prints an error and returns its exit code; only bugs in SFT-Play show a traceback."""
    if isinstance(error, KeyboardInterrupt):
        sys.stderr.write(f"interrupted: {error}\n" if str(error) else "interrupted\n")
    elif exit_code_of(error) == 1:
        if not isinstance(error, SftPlayError):  # a rank reports its traceback as text
            sys.stderr.write(redact("".join(traceback.format_exception(error))))
        sys.stderr.write(f"{redact(str(error))}\n")
        _write_error("this is a bug in SFT-Play; please report it with the lines above")
    else:
        _write_error(redact(str(error)), label="" if isinstance(error, Interrupted) else "error: ")
    return exit_code_of(error)


def _write_error(text: str, label: str = "error: ") -> None:
    """Writes to stderr; on a terminal, with breaks between words alone, and commands that can be copied."""
    if sys.stderr.isatty():
        first, *rest = text.split("\n")
        lines = (Command(line, hang=2) if line.lstrip().startswith("make ") else Text(line) for line in rest)
        Screen(stderr=True).print(Text.assemble((label, "bold red"), first), *lines)
    else:
        sys.stderr.write(f"{label}{text}\n")


def explained(error: BaseException, args: argparse.Namespace) -> BaseException:
    """The error, or one that says what a library cannot do with the config."""
    if exit_code_of(error) != 1 or isinstance(error, SftPlayError):
        return error
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        name = str(error.filename)
        return ConfigError(
            f"no file can be called {name[:60]}... ({len(name):,} characters); use a shorter name"
        )
    from sft_play.config.load import load_config
    from sft_play.libraries import library_failure

    config = None
    if getattr(args, "config", None):
        with contextlib.suppress(SftPlayError):
            config = load_config(args.config, args.overrides).config
    return library_failure(error, config) or error


def _spread(parser: argparse.ArgumentParser, argv: list[str]) -> list[str]:
    """Replaces `--args=TEXT`, in which the Makefile hands on ARGS, by the words of the text.

    They are split like a shell splits them, but nothing in them is expanded or run.
    """
    words: list[str] = []
    for argument in argv:
        flag, _, text = argument.partition("=")
        try:
            words += shlex.split(text) if flag == "--args" else [argument]
        except ValueError as error:
            parser.error(f"ARGS={text!r} cannot be split into words: {str(error).lower()}")
    return words


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Parses the arguments; unlike plain argparse, it allows overrides before and after flags."""
    words = _spread(parser, sys.argv[1:] if argv is None else argv)
    args, rest = parser.parse_known_args(words)
    if rest and (not hasattr(args, "overrides") or any(argument.startswith("-") for argument in rest)):
        settings = _as_settings(rest, words) if hasattr(args, "overrides") else ""
        parser.error(f"unrecognized arguments: {' '.join(rest)}{settings}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


def _as_settings(unknown: list[str], words: list[str]) -> str:
    """How the unknown flags among these words are written here, as far as they are settings."""
    from sft_play.config.load import as_override

    found = []
    for flag in unknown:
        name, _, value = flag.partition("=")
        following = words[words.index(flag) + 1 :][:1]
        if not value and following and not following[0].startswith("-") and "=" not in following[0]:
            value = following[0]
        if flag.startswith("--") and (setting := as_override(name, value or "true")):
            found.append(setting)
    return f"; settings are written as section.key=value: {shlex.join(found)}" if found else ""


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    secure_streams()
    set_environment()
    if sys.flags.optimize > 1:
        return report_error(ConfigError(WITHOUT_DOCSTRINGS))
    args = parse(build_parser(), argv)
    if args.json or args.prints:
        require_output()
    try:
        with console_on_stderr() if args.json else contextlib.nullcontext():
            code = args.function(args)
        sys.stdout.flush()
        return code
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - every error becomes an exit code here
        return report_error(explained(error, args))


def run_rank(argv: list[str]) -> int:
    """Runs one rank of a distributed run (scripts/train_distributed.py) and returns its exit code.

    A rank that was launched by `sft-play` reports its error to the launcher; other ranks (torchrun) print it.
    """
    secure_streams()
    set_environment(rank=True)
    if sys.flags.optimize > 1:
        return report_error(ConfigError(WITHOUT_DOCSTRINGS))
    parser = argparse.ArgumentParser(
        prog="train_distributed.py", description="Run one rank of a distributed training run."
    )
    parser.add_argument("--config", required=True, help="YAML config file")
    parser.add_argument("--probe", action="store_true", help="measure the largest batch and exit")
    # python -m torch.distributed.launch passes it, beside the variable LOCAL_RANK, which counts
    parser.add_argument("--local-rank", "--local_rank", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parse(parser, argv)
    from sft_play.launch.ranks import SINGLE_PROCESS, RankEnvironment, finish_rank, says_lost_peer
    from sft_play.machine.process import importing_libraries

    ranks = SINGLE_PROCESS
    try:
        ranks = RankEnvironment.read()
        ranks.require_whole_world()
        with importing_libraries():
            from sft_play.commands.rank import run_rank as train_rank

        train_rank(args.config, args.overrides, ranks, probe_only=args.probe)
    except (Exception, KeyboardInterrupt) as raised:  # noqa: BLE001 - every error becomes an exit code here
        trace = "".join(traceback.format_exception(raised))
        error = raised if says_lost_peer(trace) else explained(raised, args)
        code = exit_code_of(error)
        if ranks.reports_folder is None:
            return report_error(error)
        text = str(error) if isinstance(error, SftPlayError | KeyboardInterrupt) else trace
        return finish_rank(ranks, code, text, type(error).__name__)
    return finish_rank(ranks, 0)
