"""Maps each command to a function of handlers.py or data_handlers.py, and every error to an exit code."""

import argparse
import contextlib
import errno
import os
import shlex
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from rich.text import Text

from sft_play import __version__
from sft_play.commands import data_handlers, handlers
from sft_play.errors import ConfigError, Interrupted, SftPlayError
from sft_play.launch.environment import settle_environment
from sft_play.runlog import console_on_stderr
from sft_play.screen import Command, Screen
from sft_play.secrets import redact
from sft_play.streams import require_output, secure_streams

MOST_PROCESSES = 16_384  # far more than fine-tuning needs; plans for more take minutes
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


class _Commands:
    """The argument parser, to which commands are added one by one."""

    def __init__(self) -> None:
        self.parser = _Parser(
            prog="sft-play",
            description="Plan, run and evaluate the fine-tuning of an LLM on the GPUs you have.",
        )
        self.parser.add_argument("--version", action="version", version=f"sft-play {__version__}")
        self._commands = self.parser.add_subparsers(dest="command", required=True, metavar="command")

    def add(
        self,
        name: str,
        function: Any,
        *,
        config: bool = True,
        as_json: bool = False,
        needs_config: bool = True,
        prints: bool = False,
    ) -> argparse.ArgumentParser:
        """Adds a command.

        Args:
            name: of the command.
            function: called with the parsed arguments; its docstring is the help text.
            config: whether the command takes --config and overrides.
            as_json: whether the command takes --json.
            needs_config: whether --config must be given.
            prints: whether all it makes is what it prints.
        """
        text = (function.__doc__ or "").splitlines()[0]
        command = self._commands.add_parser(name, help=text, description=text)
        command.set_defaults(function=function, json=False, prints=prints)
        if config:
            command.add_argument("--config", required=needs_config, help="YAML config file")
            command.add_argument(
                "overrides", nargs="*", metavar="section.key=value", help="config values to override"
            )
        if as_json:
            command.add_argument("--json", action="store_true", help="print a JSON object to stdout")
        return command


def _number_from(least: int, setting: str, most: int | None = None) -> Callable[[str], int]:
    """Reads a whole number from `least` to `most`, which was typed as this setting of make."""

    def read(text: str) -> int:
        from sft_play.launch.nodes import whole_number

        try:
            return whole_number(setting, text, least, most)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def build_parser() -> argparse.ArgumentParser:
    """All commands and flags."""
    commands = _Commands()
    _add_machine_commands(commands)
    _add_data_commands(commands)
    _add_training_commands(commands)
    _add_model_commands(commands)
    return commands.parser


def _add_machine_commands(commands: _Commands) -> None:
    commands.add("gpu-info", handlers.gpu_info, config=False, as_json=True, prints=True)
    commands.add("memory-check", handlers.memory_check, config=False, as_json=True, prints=True)
    command = commands.add("device-profile", handlers.device_profile, config=False, as_json=True, prints=True)
    command.add_argument("--again", action="store_true", help="measure again")
    command = commands.add("setup-accelerate", handlers.setup_accelerate, config=False)
    command.add_argument("--auto", action="store_true", help="write the config without asking questions")
    commands.add("config-schema", handlers.config_schema, config=False, prints=True)
    commands.add("check", handlers.check, as_json=True, prints=True)


def _add_data_commands(commands: _Commands) -> None:
    commands.add("process", data_handlers.process)
    command = commands.add("style", data_handlers.style)
    command.add_argument("--style", required=True, metavar="TEXT", help="system prompt to add")
    commands.add("render", data_handlers.render)
    command = commands.add("prepare", data_handlers.prepare, as_json=True, prints=True)
    command.add_argument(
        "--show", type=_number_from(0, "SHOW"), default=0, metavar="N", help="print the first N training rows"
    )
    command = commands.add("dapt-docx", data_handlers.dapt_docx, config=False, as_json=True)
    command.add_argument("--input", required=True, metavar="FOLDER", help="folder of documents")
    command.add_argument("--output", required=True, metavar="FILE", help="JSONL file to write")
    _add_force(command)


def _add_training_commands(commands: _Commands) -> None:
    command = commands.add("plan", handlers.plan, as_json=True, needs_config=False, prints=True)
    model_help = "plan for this model instead, e.g. qwen3-8b; without --gpu: on each common GPU"
    command.add_argument("--model", metavar="NAME", help=model_help)
    command.add_argument("--gpu", metavar="NAME", help='plan for this GPU instead, e.g. "RTX 4090"')
    gpus_help = "number of GPUs (default: all visible GPUs, or one with --gpu)"
    command.add_argument("--gpus", type=_number_from(1, "NGPU", MOST_PROCESSES), metavar="N", help=gpus_help)
    _add_processes(commands.add("probe", handlers.probe, as_json=True))
    _add_training_flags(commands.add("train", handlers.train))
    _add_slurm_flags(commands.add("slurm", handlers.slurm))
    command = commands.add("tensorboard", handlers.tensorboard, config=False)
    command.add_argument("--runs", default="runs", help="folder of all runs")
    command.add_argument("--stop", action="store_true", help="stop the TensorBoard of this folder")


def _add_model_commands(commands: _Commands) -> None:
    command = commands.add("eval", handlers.evaluate, as_json=True)
    command.add_argument("--split", choices=["val", "test"], default="val", help="(default: val)")
    limit_help = "number of rows to generate answers for (default: eval.limit)"
    command.add_argument("--limit", type=_number_from(1, "LIMIT"), metavar="N", help=limit_help)
    _add_harness_flags(commands.add("eval-lm", handlers.evaluate_tasks, as_json=True))
    command = commands.add("infer", handlers.infer, as_json=True)
    command.add_argument("--input", help="file with prompts; without it, start a chat")
    command.add_argument("--output", help="JSONL file to write the answers to")
    _add_force(command)
    command = commands.add("merge", handlers.merge, as_json=True)
    command.add_argument(
        "--output", help="folder for the merged model (default: merged/ in the run directory)"
    )
    dtypes = ["auto", "bfloat16", "float16", "float32"]
    command.add_argument("--dtype", choices=dtypes, default="auto", help="data type of the saved weights")
    command = commands.add("export", handlers.export, as_json=True)
    command.add_argument("--format", default="gguf", help="(default: gguf, the only one)")
    command.add_argument("--output", help="folder to write (default: gguf/ in the run directory)")
    dtype_help = "f32, f16, bf16, q8_0, or auto: that of the merged model (default)"
    command.add_argument("--dtype", default="auto", help=dtype_help)
    command = commands.add("push", handlers.push, as_json=True)
    command.add_argument("--repo", required=True, metavar="USER/NAME", help="repository on the Hub")
    command.add_argument("--what", default="result", help="result or merged (default: result)")
    command.add_argument("--public", action="store_true", help="make a public repository (default: private)")
    command = commands.add("merge-test", handlers.merge_test, as_json=True)
    command.add_argument("--output", help="folder of the merged model")
    command = commands.add("report", handlers.report, config=False)
    command.add_argument("name", nargs="?", help="name or path of the run (default: the latest)")
    command.add_argument("--runs", default="runs", help="folder of all runs")
    command = commands.add("compare", handlers.compare, config=False)
    command.add_argument("names", nargs="+", metavar="name", help="names or paths of runs")
    command.add_argument("--runs", default="runs", help="folder of all runs")
    command.add_argument("--output", help="HTML file to write (default: compare.html beside the first run)")
    _add_force(command)


def _add_force(command: argparse.ArgumentParser) -> None:
    command.add_argument("--force", action="store_true", help="overwrite a file that is not ours")


def _add_harness_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--tasks", required=True, metavar="A,B", help="tasks of lm-eval, e.g. hellaswag")
    command.add_argument("--what", default="result", help="result, base or merged (default: result)")
    command.add_argument("--input", metavar="FOLDER", help="folder with more task definitions (*.yaml)")
    command.add_argument(
        "--limit", type=_number_from(1, "LIMIT"), metavar="N", help="rows of each task (default: all)"
    )
    command.add_argument(
        "--shots",
        type=_number_from(0, "SHOTS"),
        metavar="N",
        help="examples in the prompt (default: the task's)",
    )
    command.add_argument("--chat", action="store_true", help="put prompts into the chat template of the run")


def _add_processes(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--processes",
        type=_number_from(0, "NGPU", MOST_PROCESSES),
        default=1,
        metavar="N",
        help="number of processes; 0: one per visible GPU (default: 1)",
    )
    _add_engine(command)


def _add_engine(command: argparse.ArgumentParser) -> None:
    command.add_argument("--engine", metavar="NAME", help="distributed engine (default: parallel.engine)")


def _add_training_flags(command: argparse.ArgumentParser) -> None:
    _add_processes(command)
    command.add_argument("--tensorboard", action="store_true", help="serve TensorBoard while training")
    command.add_argument("--resume", action="store_true", help="resume from the latest checkpoint")
    command.add_argument("--nodes", metavar="N", help="number of nodes; run the same command on each of them")
    command.add_argument(
        "--node-rank", metavar="N", help="rank of this node; rank 0 writes the run directory"
    )
    command.add_argument("--master-addr", metavar="ADDRESS", help="address of node 0 for the other nodes")
    command.add_argument("--master-port", metavar="PORT", help="port on node 0 (default: 29500)")


def _add_slurm_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--nodes", metavar="N", help="number of nodes (default: 1)")
    command.add_argument(
        "--gpus", metavar="N", help="GPUs per node; 0: none (default: the default of the partition)"
    )
    _add_engine(command)
    command.add_argument("--partition", help="SLURM partition")
    command.add_argument("--time", help="time limit, e.g. 24:00:00")
    command.add_argument("--account", help="SLURM account")
    command.add_argument(
        "--sbatch", metavar="OPTIONS", help='further options of sbatch, e.g. "--qos=high --exclusive"'
    )


def set_environment(*, rank: bool = False) -> None:
    """Library settings that must be set before the libraries are imported; `rank`: in a rank of a run."""
    settle_environment(os.environ, rank=rank)
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # otherwise TRL reports every run
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # prepare() forks processes
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "warning")
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
    args, rest = parser.parse_known_args(_spread(parser, sys.argv[1:] if argv is None else argv))
    if rest and (not hasattr(args, "overrides") or any(argument.startswith("-") for argument in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


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
