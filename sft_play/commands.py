"""What each command does: a function each, which imports what it needs, so that the light ones stay light."""

import argparse
import json
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from sft_play.errors import CheckpointError


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


def _data_folder(resolved: Any) -> Path:
    from sft_play.runlog import open_run

    folder = open_run(resolved.config.output.dir, resolved.config.output.name).path / "data"
    folder.mkdir(exist_ok=True)
    return folder


def _said(out: Path, counts: Mapping[str, int]) -> int:
    from sft_play.runlog import console

    rows = ", ".join(f"{count:,} {what}" for what, count in counts.items())
    console().print(f"{out}\n  {rows}", markup=False)
    return 0


def process(args: argparse.Namespace) -> int:
    """Step 1 of the data: rows of any format as conversations."""
    from sft_play.data import show

    resolved = _load(args)
    out = _data_folder(resolved) / "processed.jsonl"
    return _said(out, show.process(resolved.config, out))


def style(args: argparse.Namespace) -> int:
    """Step 2 of the data: conversations with a system prompt."""
    from sft_play.data import show

    folder = _data_folder(_load(args))
    rows = _earlier_step(folder, "processed.jsonl", "process")
    return _said(folder / "styled.jsonl", show.style(rows, folder / "styled.jsonl", args.style))


def render(args: argparse.Namespace) -> int:
    """Step 3 of the data: text as the model sees it, and which parts it learns."""
    from sft_play.data import show
    from sft_play.model import load_tokenizer

    resolved = _load(args)
    folder = _data_folder(resolved)
    styled = folder / "styled.jsonl"
    rows = styled if styled.exists() else _earlier_step(folder, "processed.jsonl", "process")
    out = folder / "rendered.jsonl"
    return _said(out, show.render(resolved.config, load_tokenizer(resolved.config.model), rows, out))


def _earlier_step(folder: Path, name: str, target: str) -> Path:
    """The file of an earlier data step.

    Raises:
        CheckpointError: that step was not taken.
    """
    if not (folder / name).exists():
        raise CheckpointError(f"{folder / name} is not there yet; run `make {target}` with the same CONFIG first")
    return folder / name


def plan(args: argparse.Namespace) -> int:
    """Predicts memory and speed and chooses how to run, without running; for this machine or another (--gpu)."""
    from sft_play.hardware import detect, what_if
    from sft_play.model import load_model_config
    from sft_play.planning import data_facts, plan_run, scaling
    from sft_play.report.plan import plan_report
    from sft_play.runlog import cache_dir, console, quiet_libraries

    machine = what_if(args.gpu, args.gpus or 1) if args.gpu else detect()
    with quiet_libraries(cache_dir() / "plan.log"):
        config = _load(args).config
        model_config = load_model_config(config.model)
        facts = data_facts(config, model_config, progress=not args.json)
        chosen = plan_run(config, model_config, facts, machine, args.gpus or len(machine.gpus) or 1)
        scales = scaling(config, model_config, facts, machine)
    if args.json:
        _print_json(chosen.to_json() | {"scaling": scales})
    else:
        console().print(plan_report(chosen.to_json(), scales))
    return 0


def probe(args: argparse.Namespace) -> int:
    """Runs two steps and an evaluation at the largest batch: measured memory against predicted."""
    from sft_play.report.probe import probe_report
    from sft_play.runlog import console
    from sft_play.training import probe_command

    result = probe_command(args.config, args.overrides, processes=args.processes, engine=args.engine)
    if args.json:
        _print_json(result)
    else:
        console().print(probe_report(result["plan"], result["probe"]))
    return 0


def train(args: argparse.Namespace) -> int:
    """Trains, on one process here or on several through accelerate."""
    from sft_play.launch.nodes import NodeFlags, make_words, read_nodes
    from sft_play.launch.tensorboard import while_training
    from sft_play.training import train_command

    flags = NodeFlags(args.nodes, args.node_rank, args.master_addr, args.master_port)
    nodes = read_nodes(flags, make_words(args.config, args.overrides, args.processes, args.engine))
    with while_training(_runs_folder(args)) if args.tensorboard else nullcontext():
        return train_command(
            args.config, args.overrides, processes=args.processes, engine=args.engine, resume=args.resume, nodes=nodes
        )


def slurm(args: argparse.Namespace) -> int:
    """Submits a training run to SLURM, on one or more of its machines."""
    from sft_play.config.load import load_config
    from sft_play.launch.slurm import read_job, submit, told
    from sft_play.runlog import console
    from sft_play.sizing.batch import batch_choices

    config = load_config(args.config, args.overrides).config
    asked = {"partition": args.partition, "time": args.time, "account": args.account, "more": args.sbatch}
    job = read_job(args.nodes, args.gpus, config.output.name, **asked)
    if job.processes and not config.train.packing:
        batch_choices(config.train, job.nodes * job.processes, None)  # refused now, and not after hours in the queue
    job_id = submit(job, config=args.config, engine=args.engine, overrides=args.overrides)
    console().print(told(job_id, job), markup=False, soft_wrap=True)
    return 0


def _runs_folder(args: argparse.Namespace) -> Path:
    from sft_play.config.load import load_config

    return Path(load_config(args.config, args.overrides).config.output.dir)


def tensorboard(args: argparse.Namespace) -> int:
    """Starts TensorBoard on 127.0.0.1 and a free port, or stops it."""
    from sft_play.launch import tensorboard as server
    from sft_play.runlog import console

    if args.stop:
        console().print("stopped" if server.stop(Path(args.runs)) else "no TensorBoard of ours is running")
    else:
        server.start(Path(args.runs))
    return 0


def setup_accelerate(args: argparse.Namespace) -> int:
    """Writes accelerate's default config, by its wizard or from what this machine has."""
    from sft_play.launch.setup import setup_accelerate as setup

    return setup(args.auto)


def memory_check(args: argparse.Namespace) -> int:
    """Shows what memory is left for a run."""
    from sft_play.hardware import detect
    from sft_play.launch.setup import memory_report, memory_table
    from sft_play.runlog import console

    machine = detect()
    if args.json:
        _print_json(memory_report(machine))
    else:
        console().print(memory_table(machine))
    return 0


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
    if not args.input:
        chat(resolved.config, run)
        return 0
    result = infer_batch(resolved.config, run, Path(args.input), Path(args.output or run.path / "answers.jsonl"))
    if args.json:
        _print_json(result)
    return 0


def merge(args: argparse.Namespace) -> int:
    """Adds the adapter into the 16-bit base."""
    from sft_play.merge import merge as merge_run

    resolved = _load(args)
    result = merge_run(resolved.config, _finished_run(resolved), _output(args), args.dtype)
    if args.json:
        _print_json(result)
    return 0


def _output(args: argparse.Namespace) -> Path | None:
    return Path(args.output) if args.output else None


def merge_test(args: argparse.Namespace) -> int:
    """Compares the merged model's logits with the adapter model's."""
    from sft_play.merge import merge_test as test

    resolved = _load(args)
    result = test(resolved.config, _finished_run(resolved), _output(args))
    if args.json:
        _print_json(result)
    return 0
