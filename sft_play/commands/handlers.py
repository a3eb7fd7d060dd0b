"""One function per command; what takes long is imported when it runs, so that light commands start fast."""

import os
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from sft_play.commands.command_line import (
    INTERRUPTED_BY_USER,
    Arguments,
    amount,
    announce,
    choice,
    command,
    end,
    finished_run,
    flag,
    importing,
    loaded_config,
    number,
    switch,
)
from sft_play.errors import CheckpointError, ConfigError
from sft_play.hooks import NO_HOOKS, Hooks
from sft_play.spelling import make, var
from sft_play.ui.console import console, quiet_libraries

MOST_ROWS, MOST_TOKENS, MOST_IMAGES = 10_000_000, 2**20, 1000  # of data that is not here
MOST_PROCESSES = 16_384  # far more than fine-tuning needs; plans for more take minutes
DTYPES = ("auto", "bfloat16", "float16", "float32")  # of merged weights

force = switch("--force", "overwrite a file that SFT-Play did not write")
engine = flag("--engine", "distributed engine (default: parallel.engine)", metavar="NAME")
processes = number(
    "--processes", "NGPU", "processes; 0: one per visible GPU (default: 1)", 0, MOST_PROCESSES, default=1
)
folder_of_runs = flag("--runs", "folder of all runs", type=Path, default="runs", show_default=True)


@command("check", as_json=True, prints=True, examples=["--config my.yaml"])
def check(args: Arguments) -> int:
    """Check config, data, model, memory, devices, disk and package versions."""
    from sft_play.cache import log_of
    from sft_play.commands import check

    with quiet_libraries(log_of("check")):
        findings = check.check(args.config, args.overrides)
    code, table = check.exit_code(findings), check.findings_table(findings)
    tree = {"exit_code": code, "findings": [asdict(finding) for finding in findings]}
    if code:
        end(args, tree, table)
    else:
        end(args, tree, table, "", then=["plan", "train"])
    return code


@command(
    "plan",
    needs_config=False,
    as_json=True,
    prints=True,
    examples=[
        '--model qwen3-8b --gpu "RTX 4090"',
        "--config my.yaml --why",
        "--config my.yaml tuning.mode=qlora",
    ],
)
@flag(
    "--model", "plan for this model instead, e.g. qwen3-8b; without --gpu: on each common GPU", metavar="NAME"
)
@flag("--gpu", 'plan for this GPU instead, e.g. "RTX 4090"', metavar="NAME")
@number("--gpus", "NGPU", "number of GPUs (default: all visible GPUs, or one with --gpu)", 1, MOST_PROCESSES)
@flag(
    "--context",
    "find the longest row that fits (max), or check whether a row of N tokens fits",
    metavar="max|N",
)
@number("--rows", "ROWS", "number of training rows, to plan without data", 1, MOST_ROWS)
@number("--tokens", "TOKENS", "median length of these rows in tokens", 2, MOST_TOKENS)
@flag("--lengths", "or the distribution of their lengths", metavar="lognormal:MEDIAN:P95")
@number("--images", "IMAGES", "images of each of these rows", 1, MOST_IMAGES)
@flag("--pixels", "width and height of these images", metavar="1024x768")
@amount("--gpu-hour", "GPU_HOUR", "price of one GPU per hour, to estimate what the run costs", "PRICE")
@switch("--why", "also explain each choice, and show memory by phase and other numbers of GPUs")
def plan(args: Arguments, model: str | None, **_flags: object) -> int:
    """Choose a plan and predict its memory and speed, for this machine or another GPU (--gpu)."""
    if args.config:
        announce(args, *([f"with {model}"] if model else []))
    with importing():
        from sft_play.commands.plan import plan_command
        from sft_play.report.layout import ending
    found = plan_command(args, None if args.json else lambda shown: console().print(shown))
    end(args, found.tree, found.shown, *(["", ending({}, [found.command])] if found.command else []))
    return 0 if found.tree["complete"] else INTERRUPTED_BY_USER


@command("probe", as_json=True)
@processes
@engine
def probe(args: Arguments, processes: int, engine: str | None) -> int:
    """Run two steps and an evaluation on the largest batch; compare measured with predicted memory."""
    from sft_play.report.memory import probe_report

    what = "plans, then runs two steps and an evaluation at the largest batch; trains nothing"
    resolved = announce(args, what, reads_rows=True)
    _on_gpus(processes)
    with importing():
        from sft_play.commands.probe import probe_command
    result = probe_command(resolved, processes=processes, engine=engine)
    shown, several = probe_report(result["plan"], result["probe"]), processes if processes > 1 else None
    return end(args, result, shown, "", then=["train"], NGPU=several, ENGINE=engine)


@command(
    "train",
    examples=[
        "--config my.yaml",
        "--config my.yaml train.epochs=1 output.name=short",
        "--config my.yaml --processes 0    on all GPUs",
        "--config my.yaml --resume",
    ],
)
@processes
@engine
@switch("--tensorboard", "serve TensorBoard while training")
@switch("--resume", "resume from the latest checkpoint")
@flag("--nodes", "number of nodes; run the same command on each of them", metavar="N")
@flag("--node-rank", "rank of this node; rank 0 writes the run directory", metavar="N")
@flag("--master-addr", "address of node 0 for the other nodes", metavar="ADDRESS")
@flag("--master-port", "port on node 0 (default: 29500)", metavar="PORT")
def train(
    args: Arguments,
    processes: int,
    engine: str | None,
    tensorboard: bool,
    resume: bool,
    nodes: str | None,
    node_rank: str | None,
    master_addr: str | None,
    master_port: str | None,
    hooks: Hooks = NO_HOOKS,
) -> int:
    """Train, in one process or in several through accelerate."""
    from sft_play.launch.nodes import read_nodes
    from sft_play.launch.tensorboard import while_training
    from sft_play.report.layout import make_settings

    settings = make_settings(args.config, args.overrides, NGPU=processes, ENGINE=engine)
    machines = read_nodes(settings, nodes, node_rank, master_addr, master_port)
    if machines.count > 1:
        # Otherwise torch prints a C++ stack trace when the connection to another machine is lost.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    resolved = announce(args, name="resume" if resume else "train", reads_rows=machines.count == 1)
    _on_gpus(processes)
    with importing():
        from sft_play.commands.train import train_command
    runs = Path(resolved.config.output.dir)
    with while_training(runs) if tensorboard else nullcontext():
        train_command(
            resolved, processes=processes, engine=engine, resume=resume, nodes=machines, hooks=hooks
        )
    return 0


def _on_gpus(processes: int) -> None:
    """Chooses the GPUs of a run, before anything imports PyTorch."""
    from sft_play.launch.visible_gpus import use_freest_gpus

    if said := use_freest_gpus(processes):
        console().print(f"  {said}", style="dim")


def _freest_gpu_first() -> None:
    """The same for a command that generates: on one GPU, or on all if the model does not fit there."""
    from sft_play.launch.visible_gpus import put_freest_gpu_first

    put_freest_gpu_first()


@command("slurm")
@flag("--nodes", "number of nodes (default: 1)", metavar="N")
@flag("--gpus", "GPUs per node; 0: none (default: the partition's)", metavar="N")
@engine
@flag("--partition", "SLURM partition")
@flag("--time", "time limit, e.g. 24:00:00")
@flag("--account", "SLURM account")
@flag("--sbatch", 'further options of sbatch, e.g. "--qos=high --exclusive"', metavar="OPTIONS")
def slurm(
    args: Arguments,
    nodes: str | None,
    gpus: str | None,
    engine: str | None,
    partition: str | None,
    time: str | None,
    account: str | None,
    sbatch: str | None,
) -> int:
    """Submit a training run to SLURM, on one or more nodes."""
    from sft_play.launch.slurm import read_job, submission_summary, submit
    from sft_play.planning.candidates.batch import batch_choices

    config = announce(args, name="train-slurm").config
    options = {"partition": partition, "time": time, "account": account, "more": sbatch}
    job = read_job(nodes, gpus, config.output.name, **options)
    if job.processes and not config.train.packing:
        # Raise errors now and not after hours in the queue.
        groups = config.parallel.divided(job.nodes * job.processes)
        batch_choices(config.train, max(1, groups), None)
    job_id = submit(job, config=args.config, engine=engine, overrides=args.overrides)
    console().print(submission_summary(job_id, job))
    return 0


@command("tensorboard", config=False)
@folder_of_runs
@switch("--stop", "stop the TensorBoard of this folder")
def tensorboard(args: Arguments, runs: Path, stop: bool) -> int:
    """Start TensorBoard on 127.0.0.1 and a free port, or stop it."""
    from sft_play.launch import tensorboard as server

    if stop:
        console().print("stopped TensorBoard" if server.stop(runs) else "TensorBoard is not running")
    elif not runs.is_dir():
        raise CheckpointError(f"{runs} does not exist; run `{make('train')}` first")
    else:
        server.start(runs)
    return 0


@command("studio", config=False)
@folder_of_runs
def studio(args: Arguments, runs: Path) -> int:
    """Show runs, live curves, comparisons and plans as web pages on 127.0.0.1, on a free port."""
    from sft_play.studio.server import serve

    serve(runs)
    return 0


@command("eval", as_json=True, examples=["--config my.yaml --split test"])
@choice("--split", "SPLIT", "(default: val)", ("val", "test"))
@number("--limit", "LIMIT", "number of rows to generate answers for (default: eval.limit)", 1)
def evaluate(args: Arguments, split: str, limit: int | None) -> int:
    """Compare base, adapter and merged model on held-out rows."""
    what = f"each model's loss on all rows of the {split} split, and its answers to some of them"
    resolved = announce(args, what)
    run = finished_run(resolved)
    _freest_gpu_first()
    with importing():
        from sft_play.commands.evaluate import evaluate_run
        from sft_play.commands.judges import require_given
        from sft_play.commands.report import try_report
    require_given(resolved)
    result = evaluate_run(loaded_config(args), run, split, limit)
    try_report(run)
    return end(args, result, then=["infer", *(["merge"] if result["left_out"] else [])], run=run)


@command("eval-lm", as_json=True)
@flag("--tasks", "tasks of lm-eval, e.g. hellaswag", required=True, metavar="A,B")
@choice("--what", "WHAT", "(default: result)", ("result", "base", "merged"))
@flag("--input", "folder with more task definitions (*.yaml)", type=Path, metavar="FOLDER")
@number("--limit", "LIMIT", "rows of each task (default: all)", 1)
@number("--shots", "SHOTS", "examples in the prompt (default: the task's)", 0)
@switch("--chat", "put prompts into the chat template of the run")
def evaluate_tasks(
    args: Arguments,
    tasks: str,
    what: str,
    input: Path | None,
    limit: int | None,
    shots: int | None,
    chat: bool,
) -> int:
    """Run tasks of lm-eval on the trained model, its base or the merged model."""
    names = tuple(filter(None, (task.strip() for task in tasks.split(","))))
    whom = {"result": "what was trained", "base": "the base model", "merged": "the merged model"}
    run = finished_run(announce(args, f"runs lm-eval on {whom[what]}: {', '.join(names)}"))
    _freest_gpu_first()
    with importing():
        from sft_play.commands.harness import Options, evaluate_tasks
        from sft_play.commands.report import try_report
    options = Options(names, what, input, limit, shots, chat)
    result = evaluate_tasks(loaded_config(args), run, options)
    try_report(run)
    return end(args, result)


@command("infer", as_json=True, examples=["--config my.yaml", "--config my.yaml --input questions.jsonl"])
@flag("--input", "file with prompts; without it, start a chat", type=Path)
@flag("--output", "JSONL file to write the answers to", type=Path)
@force
def infer(args: Arguments, input: Path | None, output: Path | None, force: bool) -> int:
    """Chat with the trained model, or answer the prompts of a file."""
    if not input and (args.json or output):
        raise ConfigError(f"a chat writes no results; name a file of prompts, {var(IN='<file>')}")
    what = f"answers the prompts in {input}" if input else "a chat with the trained model"
    run = finished_run(announce(args, what))
    _freest_gpu_first()
    with importing():
        from sft_play.commands.chat import chat
        from sft_play.commands.infer import infer_batch
    config = loaded_config(args)
    if not input:
        chat(config, run)
        return 0
    output = output or run.path / "answers.jsonl"
    return end(args, infer_batch(config, run, input, output, force=force))


@command("merge", as_json=True)
@flag("--output", "folder for the merged model (default: merged/ in the run directory)", type=Path)
@choice("--dtype", "DTYPE", "data type of the saved weights", DTYPES)
def merge(args: Arguments, output: Path | None, dtype: str) -> int:
    """Merge the adapter into the unquantized base model."""
    run = finished_run(announce(args, "merges the adapter into the unquantized base model"))
    with importing():
        from sft_play.commands.merge import merge as merge_run
    result = merge_run(loaded_config(args), run, output, dtype)
    return end(args, result, then=["merge-test", "export"], run=run)


@command("merge-test", as_json=True)
@flag("--output", "folder of the merged model", type=Path)
def merge_test(args: Arguments, output: Path | None) -> int:
    """Compare the logits of the merged model with those of the adapter model."""
    what = "compares the logits of the merged model with those of the adapter model"
    run = finished_run(announce(args, what))
    _freest_gpu_first()
    with importing():
        from sft_play.commands.merge import merge_test as test
    return end(args, test(loaded_config(args), run, output), "", then=["export"], run=run)


@command("export", as_json=True)
@choice("--format", "FORMAT", "(default: gguf, the only one)", ("gguf",))
@flag("--output", "folder to write (default: gguf/ in the run directory)", type=Path)
@flag("--dtype", "f32, f16, bf16, q8_0, or auto: that of the merged model (default)", default="auto")
def export(args: Arguments, format: str, output: Path | None, dtype: str) -> int:
    """Export the merged model as a GGUF file, with a Modelfile for Ollama."""
    run = finished_run(announce(args, "writes the merged model as a GGUF file, for llama.cpp and Ollama"))
    with importing():
        from sft_play.commands.export import export as export_run
    return end(args, export_run(loaded_config(args), run, output, dtype))


@command("push", as_json=True)
@flag("--repo", "repository on the Hub", required=True, metavar="USER/NAME")
@choice("--what", "WHAT", "(default: result)", ("result", "merged"))
@switch("--public", "make a public repository (default: private)")
def push(args: Arguments, repo: str, what: str, public: bool) -> int:
    """Publish the trained or the merged model on the Hugging Face Hub, privately by default."""
    from sft_play.hub import access_token

    model = "the merged model" if what == "merged" else "what was trained"
    visible = "public" if public else "private"
    run = finished_run(announce(args, f"uploads {model} to {repo} on the Hugging Face Hub: {visible}"))
    access_token(repo)  # reports mistakes before libraries are loaded
    with importing():
        from sft_play.commands.push import push as push_run
    return end(args, push_run(loaded_config(args), run, repo, part=what, public=public))


@command("report", config=False, examples=["", "my"])
@flag("name", "name or path of the run (default: the latest)", required=False)
@folder_of_runs
def report(args: Arguments, name: str | None, runs: Path) -> int:
    """Write the report of a run, even of an unfinished one, as one HTML file."""
    from sft_play.cache import log_of
    from sft_play.commands.report import lacks_scaling, write_report
    from sft_play.report.record import find_run
    from sft_play.runlog import RunDir

    with quiet_libraries(log_of("report")):
        run = find_run(name, runs)
        if lacks_scaling(RunDir(run)):
            with importing():
                from sft_play.commands.scaling import add_scaling
            add_scaling(RunDir(run))
        path = write_report(run)
        console().print(f"wrote {path}")
    return 0


@command("compare", config=False)
@flag("names", "names or paths of runs", nargs=-1, required=True, metavar="name...")
@folder_of_runs
@flag("--output", "HTML file to write (default: compare.html beside the first run)", type=Path)
@force
def compare(args: Arguments, names: tuple[str, ...], runs: Path, output: Path | None, force: bool) -> int:
    """Put runs side by side, as one HTML file."""
    from sft_play.cache import log_of
    from sft_play.commands.compare import compare_command
    from sft_play.report.compare_page import compare_table

    with quiet_libraries(log_of("report")):
        found, path = compare_command(names, runs, output, force=force)
        console().print(compare_table(found))
        console().print(f"wrote {path}")
    return 0
