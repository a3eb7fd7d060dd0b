"""Words on the command line -> one function of commands.py, and every error -> one exit code."""

import argparse
import os
import sys
import traceback
from typing import Any

from sft_play import __version__, commands
from sft_play.errors import Interrupted, SftPlayError

INTERRUPTED_BY_USER = 130  # what shells report for Ctrl-C


def build_parser() -> argparse.ArgumentParser:
    """All commands and flags."""
    parser = argparse.ArgumentParser(
        prog="sft-play", description="Fits the fine-tuning of an LLM onto your GPUs and tells you why."
    )
    parser.add_argument("--version", action="version", version=f"sft-play {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")

    def add(name: str, function: Any, *, config: bool = True, as_json: bool = False) -> argparse.ArgumentParser:
        text = (function.__doc__ or "").splitlines()[0]
        command = subparsers.add_parser(name, help=text, description=text)
        command.set_defaults(function=function, json=False)
        if config:
            command.add_argument("--config", required=True, help="YAML file under configs/")
            command.add_argument("overrides", nargs="*", metavar="section.key=value")
        if as_json:
            command.add_argument("--json", action="store_true", help="print one JSON object on standard output")
        return command

    add("gpu-info", commands.gpu_info, config=False, as_json=True)
    add("memory-check", commands.memory_check, config=False, as_json=True)
    add("setup-accelerate", commands.setup_accelerate, config=False).add_argument(
        "--auto", action="store_true", help="ask nothing"
    )
    add("config-schema", commands.config_schema, config=False)
    add("check", commands.check, as_json=True)
    add("process", commands.process)
    add("style", commands.style).add_argument("--style", required=True, metavar="TEXT", help="system prompt to add")
    add("render", commands.render)
    add("prepare", commands.prepare, as_json=True).add_argument(
        "--show", type=int, default=0, metavar="N", help="print N samples"
    )
    command = add("plan", commands.plan, as_json=True)
    command.add_argument("--gpu", metavar="NAME", help='a GPU that is not here, e.g. "RTX 4090"')
    command.add_argument("--gpus", type=int, metavar="N", help="how many (default: all visible ones, else one process)")
    _add_processes(add("probe", commands.probe, as_json=True))
    _add_training_flags(add("train", commands.train))
    _add_slurm_flags(add("slurm", commands.slurm))
    command = add("tensorboard", commands.tensorboard, config=False)
    command.add_argument("--runs", default="runs", help="folder of runs")
    command.add_argument("--stop", action="store_true", help="stop the one that was started for that folder")
    command = add("eval", commands.evaluate, as_json=True)
    command.add_argument("--split", choices=["val", "test"], default="val")
    command.add_argument("--limit", type=int, help="rows that answers are generated for")
    command = add("infer", commands.infer, as_json=True)
    command.add_argument("--input", help="file of prompts; without it, a chat")
    command.add_argument("--output", help="JSONL file of answers")
    command = add("merge", commands.merge, as_json=True)
    command.add_argument("--output", help="folder of the merged model")
    command.add_argument("--dtype", choices=["auto", "bfloat16", "float16", "float32"], default="auto")
    add("merge-test", commands.merge_test, as_json=True).add_argument("--output", help="folder of the merged model")
    return parser


def _add_processes(command: argparse.ArgumentParser) -> None:
    command.add_argument("--processes", type=int, default=1, help="how many processes; 0 means one for each visible GPU")
    command.add_argument("--engine", choices=["ddp", "deepspeed_z2"], help="how they share the work")


def _add_training_flags(command: argparse.ArgumentParser) -> None:
    _add_processes(command)
    command.add_argument("--tensorboard", action="store_true", help="serve TensorBoard while training")
    command.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    command.add_argument("--nodes", metavar="N", help="how many machines; each is started with the same command")
    command.add_argument("--node-rank", metavar="N", help="which one this is; 0 writes the run directory")
    command.add_argument("--master-addr", metavar="ADDRESS", help="of machine 0, as the others reach it")
    command.add_argument("--master-port", metavar="PORT", help="where machine 0 listens (default 29500)")


def _add_slurm_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--nodes", metavar="N", help="how many machines (default 1)")
    command.add_argument("--gpus", metavar="N", help="on each machine; 0: none; default: what the partition gives")
    command.add_argument("--engine", choices=["ddp", "deepspeed_z2"], help="how the processes share the work")
    command.add_argument("--partition")
    command.add_argument("--time", help="limit, as 24:00:00")
    command.add_argument("--account")
    command.add_argument("--sbatch", metavar="WORDS", help='further words for sbatch, e.g. "--qos=high --exclusive"')


def _set_environment() -> None:
    """Library settings that must stand before the libraries are imported."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # TRL reports each run otherwise
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # prepare() forks
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "warning")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin while they wait slow a shared CPU down tenfold
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # so that GPU numbers are those of nvidia-smi and gpu-info


def exit_code_of(error: BaseException) -> int:
    """The exit code of an error; 1 is a bug of ours."""
    if isinstance(error, SftPlayError):
        return error.exit_code
    return INTERRUPTED_BY_USER if isinstance(error, KeyboardInterrupt) else 1


def report_error(error: BaseException) -> int:
    """Prints an error for a person and returns the exit code; only a bug of ours shows a traceback."""
    if isinstance(error, KeyboardInterrupt):
        sys.stderr.write("stopped\n")
    elif exit_code_of(error) == 1:
        if not isinstance(error, SftPlayError):  # a rank's bug comes with its traceback as text
            traceback.print_exception(error)
        sys.stderr.write(f"{error}\nerror: this is a bug in SFT-Play; please report it with the lines above\n")
    else:
        sys.stderr.write(f"{'' if isinstance(error, Interrupted) else 'error: '}{error}\n")
    return exit_code_of(error)


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Parses; overrides may stand anywhere, before and after flags, which argparse alone does not allow."""
    args, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(args, "overrides") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    _set_environment()
    args = parse(build_parser(), argv)
    if args.json:
        from rich.console import Console

        from sft_play.runlog import set_console

        set_console(Console(stderr=True, highlight=False))
    try:
        return args.function(args)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the edge where every error becomes an exit code
        return report_error(error)


def run_rank(argv: list[str]) -> int:
    """One rank of a launched run (scripts/train_distributed.py); returns the exit status.

    A rank that `sft-play` launched reports its error to it, one that torchrun or a person started prints it.
    """
    _set_environment()
    parser = argparse.ArgumentParser(prog="train_distributed.py", description="One process of a training run.")
    parser.add_argument("--config", required=True, help="YAML file under configs/")
    parser.add_argument("--probe", action="store_true", help="measure the largest batch and end")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parse(parser, argv)
    from sft_play.launch.ranks import RANKS_VARIABLE, check_world_size, finish_rank

    try:
        check_world_size()
        from sft_play.training import run_rank as train_rank

        train_rank(args.config, args.overrides, probe_only=args.probe)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the edge of this process
        code = exit_code_of(error)
        if RANKS_VARIABLE not in os.environ:
            return report_error(error)
        text = str(error) if isinstance(error, SftPlayError) else "".join(traceback.format_exception(error))
        return finish_rank(code, text)
    return finish_rank(0)
