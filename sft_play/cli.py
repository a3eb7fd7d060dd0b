"""From the command line to a function of handlers.py or a file beside it, from an error to an exit code."""

import contextlib
import errno
import json
import shlex
import sys
import traceback

import click
from rich.text import Text

from sft_play.commands import (  # noqa: F401 - they declare the commands
    data_handlers,
    first_handlers,
    handlers,
    machine_handlers,
    run_handlers,
)
from sft_play.commands.command_line import INTERRUPTED_BY_USER, PROGRAM, Arguments, importing
from sft_play.errors import ConfigError, Interrupted, SftPlayError
from sft_play.launch.environment import set_environment
from sft_play.machine.process import ended_by_signals
from sft_play.secrets import redact
from sft_play.ui.console import console_on_stderr
from sft_play.ui.screen import Command, Screen, write_stderr
from sft_play.ui.streams import require_output, secure_streams

COMMANDS = ("make ", "sft-play ")  # at the start of a line
WITHOUT_DOCSTRINGS = (
    "PYTHONOPTIMIZE=2 (python -OO) removes the docstrings that transformers reads; unset it, or set it to 1"
)
WITHOUT_CONFIG = "; that of the demo is configs/demo.yaml, and `sft-play init` writes one to edit"


def _told(code: int, text: str, as_json: bool) -> int:
    """The exit code of an error that stderr has; with --json, stdout has both, in place of a result."""
    if as_json:
        sys.stdout.write(json.dumps({"exit_code": code, "error": redact(text)}, indent=2) + "\n")
        sys.stdout.flush()
    return code


def exit_code_of(error: BaseException) -> int:
    """The exit code of an error; 1 means a bug in SFT-Play."""
    if isinstance(error, SftPlayError):
        return error.exit_code
    return INTERRUPTED_BY_USER if isinstance(error, KeyboardInterrupt) else 1


def report_error(error: BaseException) -> int:
    """Prints an error and returns its exit code; only bugs in SFT-Play show a traceback."""
    if isinstance(error, KeyboardInterrupt):
        write_stderr(f"interrupted: {error}\n" if str(error) else "interrupted\n")
    elif exit_code_of(error) == 1:
        if not isinstance(error, SftPlayError):  # a rank reports its traceback as text
            write_stderr("".join(traceback.format_exception(error)))
        write_stderr(f"{error}\n")
        _write_error("this is a bug in SFT-Play; please report it with the lines above")
    else:
        _write_error(str(error), label="" if isinstance(error, Interrupted) else "error: ")
    return exit_code_of(error)


def _write_error(text: str, label: str = "error: ") -> None:
    """As `write_stderr`; on a terminal, with breaks between words alone, and commands that can be copied."""
    if sys.stderr.isatty():
        first, *rest = redact(text).split("\n")
        shown = (Command(line, hang=2) if line.lstrip().startswith(COMMANDS) else Text(line) for line in rest)
        Screen(stderr=True).print(Text.assemble((label, "bold red"), first), *shown)
    else:
        write_stderr(f"{label}{text}\n")


def explained(error: BaseException, args: Arguments) -> BaseException:
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
    if args.config:
        with contextlib.suppress(SftPlayError):
            config = load_config(args.config, args.overrides).config
    return library_failure(error, config) or error


def _spread(argv: list[str]) -> list[str]:
    """Replaces `--args=TEXT`, in which the Makefile hands on ARGS, by the words of the text.

    They are split like a shell splits them, but nothing in them is expanded or run.
    """
    words: list[str] = []
    for argument in argv:
        flag, _, text = argument.partition("=")
        try:
            words += shlex.split(text) if flag == "--args" else [argument]
        except ValueError as error:
            reason = str(error).lower()
            raise click.UsageError(f"ARGS={text!r} cannot be split into words: {reason}") from None
    return words


def parse(argv: list[str] | None, program: click.Command = PROGRAM) -> Arguments:
    """Parses the arguments, overrides before and after flags.

    Raises:
        SystemExit: after --help, or if they are wrong.
    """
    words = sys.argv[1:] if argv is None else argv
    try:
        words = _spread(words)
        args = program.main(words, prog_name=program.name, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        raise SystemExit(2) from None
    except click.UsageError as error:
        context = error.ctx
        if context:
            write_stderr(f"{context.get_usage()}\n")
        settings = ""
        if context and isinstance(error, click.NoSuchOption):
            settings = _as_settings(words, context.command)
            if not settings and not error.possibilities:
                settings = _flags_of(context.command)
        files = [word for word in words if word.endswith((".yaml", ".yml"))]
        if isinstance(error, click.MissingParameter) and error.param and error.param.name == "config":
            settings = WITHOUT_CONFIG
            if files:
                settings = f"; did you mean --config {shlex.quote(files[0])}?"
        name = context.command_path if context else program.name
        said = f"{error.format_message().rstrip('.')}{settings}"
        _write_error(said, label=f"{name}: error: ")
        raise SystemExit(_told(2, said, "--json" in words)) from None
    except SftPlayError as error:  # a number that makes no sense
        raise SystemExit(_told(report_error(error), str(error), "--json" in words)) from None
    if not isinstance(args, Arguments):  # --help
        raise SystemExit(args)
    return args


def _flags_of(command: click.Command) -> str:
    """Which flags a command has."""
    names = [name for parameter in command.params for name in parameter.opts if name.startswith("--")]
    return f"; its flags: {', '.join(names or ['none'])}"


def _as_settings(words: list[str], command: click.Command) -> str:
    """How the flags among these words that a command does not have are written here, if they are settings."""
    if not any(parameter.name == "overrides" for parameter in command.params):
        return ""
    from sft_play.config.load import as_override

    known = {name for parameter in command.params for name in parameter.opts}
    found = []
    for number, flag in enumerate(words, start=1):
        name, _, value = flag.partition("=")
        following = words[number : number + 1]
        if not value and following and not following[0].startswith("-") and "=" not in following[0]:
            value = following[0]
        if name.startswith("--") and name not in known and (setting := as_override(name, value or "true")):
            found.append(setting)
    return f"; settings are written as section.key=value: {shlex.join(found)}" if found else ""


def _prepare_process(*, rank: bool = False) -> None:
    """What comes before anything that a process does; ConfigError if its environment is wrong."""
    secure_streams()
    set_environment(rank=rank)
    if sys.flags.optimize > 1:
        raise ConfigError(WITHOUT_DOCSTRINGS)


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    try:
        _prepare_process()
    except ConfigError as error:
        return report_error(error)
    args = parse(argv)
    if args.json or args.prints:
        require_output()
    try:
        with ended_by_signals(), console_on_stderr() if args.json else contextlib.nullcontext():
            code = args.run()
        sys.stdout.flush()
        return code
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - every error becomes an exit code here
        shown = explained(error, args)
        name = "interrupted" if isinstance(shown, KeyboardInterrupt) else type(shown).__name__
        return _told(report_error(shown), str(shown) or name, args.json)


RANK = click.Command(
    "train_distributed.py",
    help="Run one rank of a distributed training run.",
    callback=lambda config, overrides, **flags: Arguments(
        "train_distributed.py", run_rank, flags, config=config, overrides=overrides
    ),
    params=[
        click.Option(["--config"], required=True, help="YAML config file"),
        click.Option(["--probe"], is_flag=True, help="measure the largest batch and exit"),
        # python -m torch.distributed.launch passes it, beside the variable LOCAL_RANK, which counts
        click.Option(["--local-rank", "--local_rank"], hidden=True),
        click.Argument(["overrides"], nargs=-1, metavar="[section.key=value]..."),
    ],
)


def run_rank(argv: list[str]) -> int:
    """Runs one rank of a distributed run (scripts/train_distributed.py) and returns its exit code.

    A rank that was launched by `sft-play` reports its error to the launcher; other ranks (torchrun) print it.
    """
    try:
        _prepare_process(rank=True)
    except ConfigError as problem:
        return report_error(problem)
    args = parse(argv, RANK)
    from sft_play.launch.ranks import SINGLE_PROCESS, RankEnvironment, finish_rank, says_lost_peer
    from sft_play.machine.process import importing_libraries

    ranks = SINGLE_PROCESS
    try:
        ranks = RankEnvironment.read()
        ranks.require_whole_world()
        with importing() if ranks.is_main else importing_libraries():
            from sft_play.commands.rank import run_rank as train_rank

        train_rank(args.config, list(args.overrides), ranks, probe_only=args.flags["probe"])
    except (Exception, KeyboardInterrupt) as raised:  # noqa: BLE001 - every error becomes an exit code here
        trace = "".join(traceback.format_exception(raised))
        error = raised if says_lost_peer(trace) else explained(raised, args)
        code = exit_code_of(error)
        if ranks.reports_folder is None:
            return report_error(error)
        text = str(error) if isinstance(error, SftPlayError | KeyboardInterrupt) else trace
        return finish_rank(ranks, code, text, type(error).__name__)
    return finish_rank(ranks, 0)
