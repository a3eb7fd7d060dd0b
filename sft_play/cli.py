"""The commands: one function each, which imports what it needs. Parsing is all that happens here."""

import argparse
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from sft_play import __version__
from sft_play.errors import CheckpointError, Interrupted, SftPlayError

INTERRUPTED_BY_USER = 130  # what shells report for Ctrl-C


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")


def _load(args: argparse.Namespace) -> Any:
    from sft_play.job import load_job_config

    return load_job_config(args.config, args.overrides)


def _finished_run(resolved: Any) -> Any:
    """The run directory of a config.

    Raises:
        CheckpointError: nothing was trained there.
    """
    from sft_play.runlog import RunDir

    run = RunDir(Path(resolved.config.output.dir) / resolved.config.output.name)
    if not run.path.is_dir():
        raise CheckpointError(f"{run.path} does not exist; train it first: make train CONFIG={resolved.path}")
    return run


def gpu_info(args: argparse.Namespace) -> int:
    """Shows what this machine has."""
    from sft_play import hardware
    from sft_play.runlog import console

    machine = hardware.detect()
    if args.json:
        _print_json(hardware.to_json(machine))
    else:
        console().print(hardware.gpu_info_table(machine))
    return 0


def config_schema(args: argparse.Namespace) -> int:
    """Prints the JSON schema of config files."""
    from sft_play.config.load import json_schema

    _print_json(json_schema())
    return 0


def check(args: argparse.Namespace) -> int:
    """Looks at config, data, model, devices, disk and versions."""
    from sft_play.check import run_checks

    return run_checks(args.config, args.overrides, as_json=args.json)


def prepare(args: argparse.Namespace) -> int:
    """Tokenises the data and shows what will be learned."""
    from sft_play.data import show
    from sft_play.data.prepare import prepare as prepare_data
    from sft_play.model import load_model_config, load_tokenizer, position_limit
    from sft_play.runlog import console

    config = _load(args).config
    tokenizer = load_tokenizer(config.model)
    data = prepare_data(config, tokenizer, model_limit=position_limit(load_model_config(config.model)), progress=not args.json)
    if args.json:
        _print_json(data.stats)
        return 0
    console().print(show.table(data))
    if args.show:
        show.print_samples(data, tokenizer, args.show)
    return 0


def plan(args: argparse.Namespace) -> int:
    """Shows how the run would be carried out, without carrying it out."""
    from sft_play.plan_command import show_plan

    return show_plan(args)


def train(args: argparse.Namespace) -> int:
    """Trains, on one process here or on several through accelerate."""
    from sft_play.training import train_command

    return train_command(args.config, args.overrides, processes=args.processes, engine=args.engine, resume=args.resume)


def evaluate(args: argparse.Namespace) -> int:
    """Judges the trained model on held-out rows."""
    from sft_play.evaluate import evaluate_run

    resolved = _load(args)
    result = evaluate_run(resolved.config, _finished_run(resolved), args.split, args.limit)
    if args.json:
        _print_json(result)
    return 0


def infer(args: argparse.Namespace) -> int:
    """Chats with the trained model, or answers the prompts of a file."""
    from sft_play.infer import chat, infer_batch

    resolved = _load(args)
    run = _finished_run(resolved)
    if args.input:
        infer_batch(resolved.config, run, Path(args.input), Path(args.output or run.path / "answers.jsonl"))
    else:
        chat(resolved.config, run)
    return 0


def merge(args: argparse.Namespace) -> int:
    """Adds the adapter into the 16-bit base."""
    from sft_play.merge import merge as merge_run

    resolved = _load(args)
    run = _finished_run(resolved)
    merge_run(resolved.config, run, Path(args.output) if args.output else run.path / "merged", args.dtype)
    return 0


def merge_test(args: argparse.Namespace) -> int:
    """Compares the merged model's logits with the adapter model's."""
    from sft_play.merge import merge_test as test

    resolved = _load(args)
    test(resolved.config, _finished_run(resolved))
    return 0


def build_parser() -> argparse.ArgumentParser:
    """All commands and flags."""
    parser = argparse.ArgumentParser(
        prog="sft-play", description="Fits the fine-tuning of an LLM onto your GPUs and tells you why."
    )
    parser.add_argument("--version", action="version", version=f"sft-play {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    def add(name: str, function: Any, *, config: bool = True, as_json: bool = False) -> argparse.ArgumentParser:
        text = (function.__doc__ or "").splitlines()[0]
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(function=function, json=False)
        if config:
            command.add_argument("--config", required=True, help="YAML file under configs/")
            command.add_argument("overrides", nargs="*", metavar="section.key=value")
        if as_json:
            command.add_argument("--json", action="store_true", help="print one JSON object on standard output")
        return command

    add("gpu-info", gpu_info, config=False, as_json=True)
    add("config-schema", config_schema, config=False)
    add("check", check, as_json=True)
    add("prepare", prepare, as_json=True).add_argument("--show", type=int, default=0, metavar="N", help="print N samples")
    command = add("plan", plan, as_json=True)
    command.add_argument("--processes", type=int, help="how many processes (default: all visible GPUs, else one)")
    command = add("train", train)
    command.add_argument("--processes", type=int, default=1, help="how many processes; 0 means one for each visible GPU")
    command.add_argument("--engine", choices=["ddp", "deepspeed_z2"], help="how they share the work")
    command.add_argument("--tensorboard", action="store_true", help="serve TensorBoard while training")
    command.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    command = add("eval", evaluate, as_json=True)
    command.add_argument("--split", choices=["val", "test"], default="val")
    command.add_argument("--limit", type=int, help="rows that answers are generated for")
    command = add("infer", infer)
    command.add_argument("--input", help="file of prompts; without it, a chat")
    command.add_argument("--output", help="JSONL file of answers")
    command = add("merge", merge)
    command.add_argument("--output", help="folder of the merged model")
    command.add_argument("--dtype", choices=["auto", "bfloat16", "float16", "float32"], default="auto")
    add("merge-test", merge_test)
    return parser


def _set_environment() -> None:
    """Library settings that must stand before the libraries are imported."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # TRL reports each run otherwise
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # prepare() forks
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "warning")


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


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    _set_environment()
    args = build_parser().parse_args(argv)
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
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_args(argv)
    from sft_play.launch.ranks import RANKS_VARIABLE, check_world_size, finish_rank

    try:
        check_world_size()
        from sft_play.training import run_rank as train_rank

        train_rank(args.config, args.overrides)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the edge of this process
        code = exit_code_of(error)
        if RANKS_VARIABLE not in os.environ:
            return report_error(error)
        text = str(error) if isinstance(error, SftPlayError) else "".join(traceback.format_exception(error))
        return finish_rank(code, text)
    return finish_rank(0)
