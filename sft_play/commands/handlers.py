"""One function per command; each imports only what it needs, so that light commands start fast."""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from sft_play.errors import CheckpointError


def print_json(value: Any) -> None:
    """Prints a value as indented JSON on stdout."""
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")


def _done(args: argparse.Namespace, result: Any) -> int:
    """Ends a command that has said what it did; with --json, its result is printed as well."""
    if args.json:
        print_json(result)
    return 0


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


@contextmanager
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


def gpu_info(args: argparse.Namespace) -> int:
    """Show GPUs, CPU and RAM of this machine."""
    from sft_play.machine import gpus
    from sft_play.report.machine import gpu_info_table
    from sft_play.runlog import console

    machine = gpus.detect()
    if args.json:
        print_json(gpus.to_json(machine))
    else:
        console().print(gpu_info_table(machine))
    return 0


def device_profile(args: argparse.Namespace) -> int:
    """Show what operations cost on this device; they are measured the first time."""
    from sft_play.machine.gpus import detect
    from sft_play.report.profile import profile_report
    from sft_play.runlog import console

    with importing():
        from sft_play.planning.profiles import collectives_trees, forget_collectives, saved_profile
    machine = detect()
    tree = json.loads(saved_profile(machine, 1, again=args.again).to_json())
    if args.again:
        forget_collectives(machine)
    tree["collectives"] = collectives_trees(machine)
    if args.json:
        print_json(tree)
    else:
        console().print(profile_report(tree))
    return 0


def config_schema(args: argparse.Namespace) -> int:
    """Print the JSON schema of config files."""
    from sft_play.config.load import json_schema

    print_json(json_schema())
    return 0


def check(args: argparse.Namespace) -> int:
    """Check config, data, model, devices, disk and package versions."""
    from sft_play.commands.check import run_checks

    code = run_checks(args.config, args.overrides, as_json=args.json)
    if code == 0:
        say_next(args, "plan", "train")
    return code


def plan(args: argparse.Namespace) -> int:
    """Choose a plan and predict its memory and speed, for this machine or another GPU (--gpu)."""
    from sft_play.runlog import console

    if args.config:
        announce(args, *([f"with {args.model}"] if args.model else []))
    with importing():
        from sft_play.commands.plan import plan_command
    tree, report = plan_command(args)
    if args.json:
        print_json(tree)
        return 0
    console().print(report)
    if args.config and not (args.model or args.gpu):
        say_next(args, "train" if (args.gpus or 1) == 1 else "train-distributed")
    return 0


def probe(args: argparse.Namespace) -> int:
    """Run two steps and an evaluation on the largest batch; compare measured with predicted memory."""
    from sft_play.report.probe import probe_report
    from sft_play.runlog import console

    announce(args, "plans, then runs two steps and an evaluation at the largest batch; trains nothing")
    with importing():
        from sft_play.commands.probe import probe_command
    result = probe_command(args.config, args.overrides, processes=args.processes, engine=args.engine)
    if args.json:
        print_json(result)
    else:
        console().print(probe_report(result["plan"], result["probe"]))
        say_next(args, "train")
    return 0


def train(args: argparse.Namespace) -> int:
    """Train, in one process or in several through accelerate."""
    from sft_play.launch.nodes import NodeFlags, make_settings, read_nodes
    from sft_play.launch.tensorboard import while_training

    flags = NodeFlags(args.nodes, args.node_rank, args.master_addr, args.master_port)
    nodes = read_nodes(flags, make_settings(args.config, args.overrides, args.processes, args.engine))
    if nodes.count > 1:
        # Otherwise torch prints a C++ stack trace when the connection to another machine is lost.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    announce(args, command="resume" if args.resume else "train")
    with importing():
        from sft_play.commands.train import train_command
    with while_training(_runs_folder(args)) if args.tensorboard else nullcontext():
        return train_command(
            args.config,
            args.overrides,
            processes=args.processes,
            engine=args.engine,
            resume=args.resume,
            nodes=nodes,
        )


def slurm(args: argparse.Namespace) -> int:
    """Submit a training run to SLURM, on one or more nodes."""
    from sft_play.launch.slurm import read_job, submission_summary, submit
    from sft_play.planning.batch import batch_choices
    from sft_play.runlog import console

    config = announce(args, command="train-slurm").config
    options = {"partition": args.partition, "time": args.time, "account": args.account, "more": args.sbatch}
    job = read_job(args.nodes, args.gpus, config.output.name, **options)
    if job.processes and not config.train.packing:
        # Raise errors now and not after hours in the queue.
        batch_choices(config.train, job.nodes * job.processes, None)
    job_id = submit(job, config=args.config, engine=args.engine, overrides=args.overrides)
    console().print(submission_summary(job_id, job), markup=False)
    return 0


def _runs_folder(args: argparse.Namespace) -> Path:
    from sft_play.config.load import load_config

    return Path(load_config(args.config, args.overrides).config.output.dir)


def tensorboard(args: argparse.Namespace) -> int:
    """Start TensorBoard on 127.0.0.1 and a free port, or stop it."""
    from sft_play.launch import tensorboard as server
    from sft_play.runlog import console

    if args.stop:
        console().print(
            "stopped TensorBoard" if server.stop(Path(args.runs)) else "TensorBoard is not running"
        )
    else:
        server.start(Path(args.runs))
    return 0


def setup_accelerate(args: argparse.Namespace) -> int:
    """Write accelerate's default config, with its wizard or for this machine (--auto)."""
    from sft_play.launch.setup import setup_accelerate as setup

    return setup(args.auto)


def memory_check(args: argparse.Namespace) -> int:
    """Show the memory that is available to a run."""
    from sft_play.machine.gpus import detect, memory_report
    from sft_play.report.machine import memory_table
    from sft_play.runlog import console

    machine = detect()
    report = memory_report(machine)
    if args.json:
        print_json(report)
    else:
        console().print(memory_table(machine, report["left_per_process_bytes"]))
    return 0


def evaluate(args: argparse.Namespace) -> int:
    """Compare base, adapter and merged model on held-out rows."""
    what = f"each model's loss on all rows of the {args.split} split, and its answers to some of them"
    run = finished_run(announce(args, what))
    with importing():
        from sft_play.commands.evaluate import evaluate_run
        from sft_play.commands.report import try_report
    result = evaluate_run(load_resolved(args).config, run, args.split, args.limit)
    try_report(run)
    if args.json:
        print_json(result)
    others = ["merge"] if result["left_out"] else []
    say_next(args, "infer", *others, run=run, apart=False)
    return 0


def evaluate_tasks(args: argparse.Namespace) -> int:
    """Run tasks of lm-eval on the trained model, its base or the merged model."""
    tasks = tuple(filter(None, (task.strip() for task in args.tasks.split(","))))
    whom = {"result": "what was trained", "base": "the base model", "merged": "the merged model"}
    what = f"runs lm-eval on {whom.get(args.what, args.what)}: {', '.join(tasks)}"
    run = finished_run(announce(args, what))
    with importing():
        from sft_play.commands.harness import Options, evaluate_tasks
        from sft_play.commands.report import try_report
    folder = Path(args.input) if args.input else None
    options = Options(tasks, args.what, folder, args.limit, args.shots, args.chat)
    result = evaluate_tasks(load_resolved(args).config, run, options)
    try_report(run)
    return _done(args, result)


def infer(args: argparse.Namespace) -> int:
    """Chat with the trained model, or answer the prompts of a file."""
    what = f"answers the prompts in {args.input}" if args.input else "a chat with the trained model"
    run = finished_run(announce(args, what))
    with importing():
        from sft_play.commands.infer import chat, infer_batch
    resolved = load_resolved(args)
    if not args.input:
        chat(resolved.config, run)
        return 0
    output = Path(args.output or run.path / "answers.jsonl")
    result = infer_batch(resolved.config, run, Path(args.input), output, force=args.force)
    return _done(args, result)


def merge(args: argparse.Namespace) -> int:
    """Merge the adapter into the unquantized base model."""
    run = finished_run(announce(args, "merges the adapter into the unquantized base model"))
    with importing():
        from sft_play.commands.merge import merge as merge_run
    resolved = load_resolved(args)
    result = merge_run(resolved.config, run, _output(args), args.dtype)
    if args.json:
        print_json(result)
    say_next(args, "merge-test", "export", run=run, apart=False)
    return 0


def _output(args: argparse.Namespace) -> Path | None:
    return Path(args.output) if args.output else None


def export(args: argparse.Namespace) -> int:
    """Export the merged model as a GGUF file, with a Modelfile for Ollama."""
    run = finished_run(announce(args, "writes the merged model as a GGUF file, for llama.cpp and Ollama"))
    with importing():
        from sft_play.commands.export import export as export_run
    resolved = load_resolved(args)
    result = export_run(resolved.config, run, args.format, _output(args), args.dtype)
    return _done(args, result)


def push(args: argparse.Namespace) -> int:
    """Publish the trained or the merged model on the Hugging Face Hub, privately by default."""
    from sft_play.hub import access_token

    what = "the merged model" if args.what == "merged" else "what was trained"
    visible = "public" if args.public else "private"
    run = finished_run(announce(args, f"uploads {what} to {args.repo} on the Hugging Face Hub: {visible}"))
    access_token(args.repo, args.what)  # reports mistakes before libraries are loaded
    with importing():
        from sft_play.commands.push import push as push_run
    resolved = load_resolved(args)
    result = push_run(resolved.config, run, args.repo, part=args.what, public=args.public)
    return _done(args, result)


def merge_test(args: argparse.Namespace) -> int:
    """Compare the logits of the merged model with those of the adapter model."""
    what = "compares the logits of the merged model with those of the adapter model"
    run = finished_run(announce(args, what))
    with importing():
        from sft_play.commands.merge import merge_test as test
    resolved = load_resolved(args)
    result = test(resolved.config, run, _output(args))
    if args.json:
        print_json(result)
    say_next(args, "export", run=run)
    return 0


def report(args: argparse.Namespace) -> int:
    """Write the report of a run, even of an unfinished one, as one HTML file."""
    from sft_play.cache import cache_dir
    from sft_play.commands.report import report_command
    from sft_play.runlog import console, quiet_libraries

    with quiet_libraries(cache_dir() / "report.log"):
        path = report_command(args.name, Path(args.runs))
        console().print(f"wrote {path}", markup=False, soft_wrap=True)
    return 0


def compare(args: argparse.Namespace) -> int:
    """Put runs side by side, as one HTML file."""
    from sft_play.cache import cache_dir
    from sft_play.commands.compare import compare_command
    from sft_play.report.compare_page import compare_table
    from sft_play.runlog import console, quiet_libraries

    with quiet_libraries(cache_dir() / "report.log"):
        runs, path = compare_command(args.names, Path(args.runs), _output(args), force=args.force)
        console().print(compare_table(runs))
        console().print(f"wrote {path}", markup=False, soft_wrap=True)
    return 0
