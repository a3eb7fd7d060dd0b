"""`sft-play train`, from the config to the closing screen.

config -> data -> plan -> train (here, or through accelerate launch) -> answers before and after training
-> closing screen
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from sft_play.builtin.demo import materialise
from sft_play.commands.judges import require_given
from sft_play.commands.report import end_reported, try_report
from sft_play.config.load import ResolvedConfig, load_config
from sft_play.config.schema import RunConfig
from sft_play.errors import CheckpointError, ConfigError, DataError, DoesNotFitError, OutOfMemory
from sft_play.hooks import NO_HOOKS, Hooks
from sft_play.job import Job, prepare_job
from sft_play.launch.accelerate_config import CPU_PROCESSES
from sft_play.launch.link import Link
from sft_play.launch.nodes import ALONE, Nodes
from sft_play.launch.ranks import RankEnvironment
from sft_play.machine.gpus import detect
from sft_play.machine.host import missing
from sft_play.machine.process import ended_by_signals, importing_libraries
from sft_play.model.weights.finished import finished_weights
from sft_play.report.card import write_card
from sft_play.report.closing import closing_screen
from sft_play.report.layout import make_command
from sft_play.report.plan import plan_summary
from sft_play.report.record import other_runs
from sft_play.runlog import RunDir, hold_run, open_run, read_json, update_summary
from sft_play.spelling import make
from sft_play.train.multinode import agree_on_plan, connected_machines
from sft_play.ui.console import console, quiet_libraries, warn
from sft_play.ui.progress import spinner

MOST_RECOVERIES = 3  # from memory that ran out in the middle of a run; each has a smaller plan


def train_command(
    resolved: ResolvedConfig,
    *,
    processes: int,
    engine: str | None,
    resume: bool,
    nodes: Nodes,
    hooks: Hooks = NO_HOOKS,
) -> None:
    """Prepares, plans, trains, compares and reports.

    `processes` counts those of this machine (0: one per visible GPU, or two on the CPU); `engine` is
    parallel.engine for this run; with `resume`, it goes on from the latest checkpoint. `hooks` are for one
    process.

    Raises:
        ConfigError: settings, flags or environment are invalid; further errors as in `train` and `launch`.
        CheckpointError: there is no such run to resume.
    """
    resolved = with_flags(resolved, engine, resume)
    run = RunDir(Path(resolved.config.output.dir) / resolved.config.output.name)
    if resume and not nodes.rank:
        require_started(run)
    if nodes.count == 1 and resolved.config.train.resume == "auto" and is_finished(run, resolved):
        console().print(f"{run.path} has already finished: nothing is left to do, and nothing was changed")
        return
    with (
        ended_by_signals(),
        connected_machines(nodes) as link,
        opened_job(resolved, processes, nodes, hooks) as job,
        end_reported(job.run, job.config, here=not nodes.rank),
    ):
        train_job(job, link)
        if nodes.rank:
            console().print("trained; the results are on machine 0")
        else:
            close(job, compare(job))


def require_started(run: RunDir) -> None:
    """Raises CheckpointError if no run of this name has begun, so that there is nothing to resume."""
    if not run.plan.is_file() and not run.checkpoints.is_dir():
        what = "has not begun to train" if run.path.is_dir() else "does not exist"
        others = other_runs(run.path.parent)
        raise CheckpointError(f"{run.path} {what}, so there is nothing to resume{others}")


def is_finished(run: RunDir, resolved: ResolvedConfig) -> bool:
    """Whether a run has come to its end with these settings, and its weights are there and whole."""
    if read_json(run.summary).get("status") != "done":
        return False
    how = {"train": {"resume"}, "output": {"dir", "name"}}
    try:
        begun = load_config(run.config).config
        if begun.model_dump(exclude=how) != materialise(resolved).config.model_dump(exclude=how):
            return False
        finished_weights(begun, run)
    except (CheckpointError, ConfigError, DataError):  # to be made again, or a setting or data that are gone
        return False
    return True


def with_flags(resolved: ResolvedConfig, engine: str | None, resume: bool) -> ResolvedConfig:
    """The config with the command-line flags as overrides; arguments as in `train_command`.

    A checkpoint that an override names is resumed instead of the latest one.

    Raises:
        ConfigError: an override contradicts a flag, or is invalid.
    """
    typed = {name for name, origin in resolved.origins.items() if origin == "override"}
    asked, wanted = resolved.config.train.resume, resolved.config.parallel.engine
    if engine and "parallel.engine" in typed and wanted != engine:
        raise ConfigError(
            f"parallel.engine={wanted} contradicts --engine {engine}, which this make target sets; use "
            f"`{make('train', NGPU='<n>')}`, which works with any engine, or remove the override"
        )
    if resume and "train.resume" in typed and asked == "never":
        raise ConfigError(
            f"train.resume=never contradicts `{make('resume')}`; use `{make('train')}` to start over"
        )
    flags = [f"parallel.engine={engine}"] if engine else []
    flags += ["train.resume=auto"] if resume and "train.resume" not in typed else []
    return load_config(resolved.path, [*resolved.overrides, *flags])


@contextmanager
def opened_job(
    resolved: ResolvedConfig, processes: int, nodes: Nodes = ALONE, hooks: Hooks = NO_HOOKS
) -> Iterator[Job]:
    """The job of a config, whose data and plan it prints, with the run directory locked within this context.

    `processes` counts those of this machine (0: one per visible GPU, or two on the CPU); the job is that of
    all machines together.

    Raises:
        ConfigError: settings or environment are invalid; further errors as in `prepare_job`.
    """
    world_size = RankEnvironment.read().world_size
    if world_size > 1:
        raise ConfigError(
            f"WORLD_SIZE={world_size} is set, as by torchrun, but this command starts its processes itself "
            "(--processes). Launch scripts/train_distributed.py with torchrun, or unset WORLD_SIZE"
        )
    require_packages(resolved.config)
    if resolved.config.eval.generate:
        require_given(resolved)
    run = open_run(resolved.config.output.dir, resolved.config.output.name)
    with hold_run(run, nodes.rank), quiet_libraries(run.log):
        with importing_libraries():
            from sft_play.commands.questions import closing_questions
            from sft_play.data import show

        processes = (processes or len(detect().gpus) or CPU_PROCESSES) * nodes.count
        if hooks and processes > 1:
            raise ConfigError(
                f"callbacks and progress are called in this process, but {processes} others would train; "
                "leave them out, or set processes=1. metrics.jsonl of the run has the same numbers"
            )
        job = prepare_job(materialise(resolved), processes=processes, machines=nodes.count)
        job = replace(job, hooks=hooks)
        if job.config.eval.generate:
            closing_questions(job.config, job.data, job.tokenizer)  # reports mistakes before training
        console().print(show.table(job.data), "", plan_summary(job.plan.to_json()), "")
        yield job


def require_packages(config: RunConfig) -> None:
    """Raises ConfigError if a package that the config needs is not installed, or its disk cannot be used."""
    lacking = [f"{text}; {fix}" for text, fix in missing(config).items()]
    if lacking:
        raise ConfigError("\n".join(lacking) + ", or change the setting")


def train_job(job: Job, link: Link | None = None) -> None:
    """Trains, here or in several processes, which write the summary.

    If memory runs out in the middle, goes on from the last checkpoint with a smaller plan, on one machine and
    at most MOST_RECOVERIES times. `link` connects to the launchers on the other machines.

    Raises:
        OutOfMemory: memory ran out again, or there is no smaller plan; others as in `train`, `launch_ranks`.
    """
    said: list[str] = []
    while True:
        try:
            if job.plan.sharing.world_size == 1:
                with importing_libraries():
                    from sft_play.train.ranks import process_group
                with process_group(job):
                    train_here(job)
            else:
                launch_ranks(job, link)
            if said:
                update_summary(job.run, out_of_memory=said)
            return
        except OutOfMemory as error:
            if link or len(said) == MOST_RECOVERIES:
                raise
            reason = str(error)
        # here the error no longer refers to the memory of the session that failed
        job, line = _smaller_job(job, reason)
        said.append(line)
        warn(line)


def _smaller_job(job: Job, reason: str) -> tuple[Job, str]:
    """The job that goes on after memory ran out for this reason, and what is said about it."""
    from sft_play.train.recovery import continuation, smaller_job

    try:
        job = smaller_job(job)
    except DoesNotFitError as error:
        raise OutOfMemory(f"{reason}\nThere is no smaller plan to continue with: {error}") from None
    return job, f"{reason.splitlines()[0]}; {continuation(job)}"


def train_here(job: Job) -> None:
    """Trains in this process, alone or as one of several."""
    with importing_libraries():
        from sft_play.train.run import train
    train(job)


def launch_ranks(job: Job, link: Link | None = None, *, flags: Sequence[str] = ()) -> None:
    """Starts the ranks with this job's plan, through `accelerate launch`, and waits; as in `train_job`.

    Raises:
        SftPlayError: a rank failed, here or on another machine; the class has that rank's exit code.
    """
    from sft_play.launch.accelerate import launch

    job, nodes = agree_on_plan(job, link) if link else (job, ALONE)
    arguments = ["--config", str(job.resolved.path), *job.resolved.overrides, *flags]
    launch(job.plan, arguments, run=job.run, nodes=nodes, link=link)


def compare(job: Job) -> list[dict[str, object]]:
    """Adds answers to held-out rows before and after training to summary.json; returns those to be shown."""
    if not job.config.eval.generate or job.data.val is None and job.data.test is None:
        return []
    from sft_play.commands.evaluate import before_after
    from sft_play.upstream.accelerate import is_out_of_memory

    try:
        comparison = before_after(job.config, job.run, job.data, job.tokenizer)
    except (RuntimeError, MemoryError, DoesNotFitError) as error:
        if not isinstance(error, DoesNotFitError) and not is_out_of_memory(error):
            raise
        warn("no answers are compared: the model does not fit on one device")
        return []
    if comparison is None:  # no row ends in an answer
        return []
    losses = read_json(job.run.summary).get("eval") or {}
    merged = {when: {**(losses.get(when) or {}), **found} for when, found in comparison.scores.items()}
    update_summary(job.run, eval=merged, samples=comparison.samples)
    if "tensorboard" in job.config.train.report_to:
        from sft_play.train.trackers import show_answers

        steps = read_json(job.run.summary).get("optimizer_steps") or 0
        try:
            show_answers(job.run, steps, comparison.samples, comparison.scores)
        except OSError as error:
            warn(f"the sample answers are not in TensorBoard: {error.strerror}")
    return comparison.samples


def close(job: Job, samples: Sequence[Mapping[str, object]] = ()) -> None:
    """Ends a run that is done, and says so in its summary: model card, report, closing screen."""
    run = job.run
    whole = job.config.tuning.mode == "full"
    weights = run.model if whole else run.adapter
    with spinner("writing the report"):
        write_card(job.config, run, weights)
        summary = update_summary(run, status="done")
        reports = try_report(run)
    places = {"weights": weights, "numbers": run.metrics, "summary": run.summary, "log": run.log}
    targets = ("infer", "eval", "export" if whole else "merge")
    commands = [make_command(target, RUN=run.typed) for target in targets]
    console().print(closing_screen(summary, samples, places | reports, commands))
