"""`sft-play train`, from the config to the closing screen, and what each rank of a launched run does.

config -> data -> plan -> train (here, or through accelerate launch) -> answers before and after -> closing screen
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sft_play.config.load import ResolvedConfig, load_config
from sft_play.config.schema import RunConfig
from sft_play.demo import materialise
from sft_play.errors import ConfigError
from sft_play.hardware import detect
from sft_play.host import missing_packages
from sft_play.job import PLAN_VARIABLE, Job, load_job_config, prepare_job, world_size
from sft_play.launch.accelerate import CPU_PROCESSES
from sft_play.launch.link import Link
from sft_play.launch.nodes import ALONE, Nodes
from sft_play.machines import agree, met
from sft_play.report.plan import reasons
from sft_play.report.tables import closing_screen
from sft_play.runlog import console, hold_run, is_main_rank, open_run, quiet_libraries, read_json, update_summary


def train_command(
    path: str, overrides: list[str], *, processes: int, engine: str | None, resume: bool, nodes: Nodes = ALONE
) -> int:
    """Prepares, plans, trains, compares, reports.

    Args:
        path: config file.
        overrides: `section.key=value`.
        processes: how many on this machine; 0 means one for each visible GPU, without a GPU two on the CPU.
        engine: parallel.engine for this run.
        resume: go on from the newest checkpoint.
        nodes: which of several machines this is.

    Raises:
        ConfigError: settings, flags or environment are wrong; further errors as `train` and `launch` raise them.
    """
    overrides = [*overrides, *_as_overrides(engine, resume)]
    load_config(path, overrides)  # a mistake in it is said before other machines are waited for
    with met(nodes) as link, opened_job(path, overrides, processes, nodes) as job:
        summary = train_here(job) if job.plan.world_size == 1 else train_on_many(job, [path, *overrides], link)
        if nodes.rank:
            console().print("trained; the results are on machine 0")
            return 0
        comparison = compare(job)
        console().print(closing_screen(summary, comparison, places(job), next_commands(job)))
    return 0


def probe_command(path: str, overrides: list[str], *, processes: int, engine: str | None) -> dict[str, Any]:
    """Prepares, plans and probes, and leaves an earlier run of the name as it is.

    Returns:
        {"plan": as `sft-play plan --json`, "probe": the fields of a Proof}.

    Raises:
        DoesNotFitError: it does not fit, or as `train_command`.
    """
    overrides = [*overrides, *_as_overrides(engine, resume=False)]
    with opened_job(path, overrides, processes) as job:
        if job.config.train.probe is False:
            raise ConfigError("train.probe=false leaves nothing to measure; drop it, or add ARGS=train.probe=true")
        if job.plan.world_size == 1:
            return probe_here(job)
        launch_ranks(job, [path, *overrides, "--probe"])
        return read_json(job.run.probe)


def _as_overrides(engine: str | None, resume: bool) -> list[str]:
    return ([f"parallel.engine={engine}"] if engine else []) + (["train.resume=auto"] if resume else [])


@contextmanager
def opened_job(path: str, overrides: list[str], processes: int, nodes: Nodes = ALONE) -> Iterator[Job]:
    """The job of a config, with its run directory held; 0 processes means one for each visible GPU, on the CPU two.

    `processes` are those of this machine, the job is that of all machines together.

    Raises:
        ConfigError: settings or environment are wrong; further errors as `prepare_job` raises them.
    """
    if world_size() > 1:
        raise ConfigError(
            f"WORLD_SIZE={world_size()} is set, as by torchrun: this command starts its processes itself (--processes). "
            "Launch scripts/train_distributed.py with torchrun, or unset WORLD_SIZE"
        )
    resolved = load_config(path, overrides)
    require_packages(resolved.config)
    run = open_run(resolved.config.output.dir, resolved.config.output.name)
    with hold_run(run, nodes.rank), quiet_libraries(run.log):
        yield open_job(materialise(resolved), (processes or default_processes()) * nodes.count)


def require_packages(config: RunConfig) -> None:
    """Looks for what the config needs before any work is done.

    Raises:
        ConfigError: a package is not installed.
    """
    missing = missing_packages(config)
    if missing:
        raise ConfigError("\n".join([*missing, "run `make install`, or change the setting"]))


def default_processes() -> int:
    """One for each visible GPU; two on the CPU."""
    return len(detect().gpus) or CPU_PROCESSES


def open_job(resolved: ResolvedConfig, processes: int) -> Job:
    """Data and plan, shown as they are made."""
    from sft_play.data import show

    console().print(f"[bold]{resolved.config.output.name}[/]  {resolved.path}")
    job = prepare_job(resolved, processes=processes)
    console().print(show.table(job.data))
    console().print(reasons(job.plan.why))
    return job


def train_here(job: Job) -> dict[str, Any]:
    """One process: this one."""
    from sft_play.train.trainer import train

    return train(job)


def probe_here(job: Job) -> dict[str, Any]:
    """The probe in this process; on the main rank also written into the run directory."""
    from sft_play.train.probe import prove

    session, proof = prove(job)
    result = {"plan": session.job.plan.to_json(), "probe": asdict(proof) if proof else None}
    if is_main_rank():
        job.run.write_json(job.run.probe, result)
    return result


def train_on_many(job: Job, words: list[str], link: Link | None = None) -> dict[str, Any]:
    """Several processes, through `accelerate launch`; returns the summary that they wrote.

    Args:
        job: what they train.
        words: config file and overrides, as given.
        link: to the launchers of other machines.

    Raises:
        SftPlayError: a rank failed, here or on another machine; carries that rank's exit code.
    """
    launch_ranks(job, words, link)
    return read_json(job.run.summary)


def launch_ranks(job: Job, words: list[str], link: Link | None = None) -> None:
    """Starts the ranks, which find the plan that was made here, and waits for them; errors as `train_on_many`."""
    from sft_play.launch.accelerate import launch

    nodes = ALONE
    if link:
        job, nodes = agree(job, link)
    handed_over = job.run.next_plan.with_suffix(f".node{nodes.rank}.json" if nodes.rank else ".json")
    job.run.write_json(handed_over, job.plan.to_json())
    launch(
        job.plan,
        script=["scripts/train_distributed.py", "--config", *words],
        run=job.run,
        environment={PLAN_VARIABLE: str(handed_over.absolute())},
        nodes=nodes,
        link=link,
    )


def compare(job: Job) -> dict[str, Any] | None:
    """Generated answers of the model before and after training, on held-out rows; also put into summary.json."""
    if not job.config.eval.generate or job.data.val is None and job.data.test is None:
        return None
    from sft_play.evaluate import before_after

    comparison = before_after(job.config, job.run, job.data, job.tokenizer)
    if comparison is None:  # no row ends in an answer
        return None
    scores = read_json(job.run.summary).get("eval") or {}
    merged = {when: {**(scores.get(when) or {}), **comparison[when]} for when in ("before", "after")}
    update_summary(job.run, eval=merged, samples=comparison["samples"])
    return comparison


def places(job: Job) -> dict[str, Path]:
    """What the run leaves behind, by name."""
    weights = job.run.model if job.config.tuning.mode == "full" else job.run.adapter
    return {"weights": weights, "numbers": job.run.metrics, "summary": job.run.summary, "log": job.run.log}


def next_commands(job: Job) -> list[str]:
    """What to type next; overrides are in the resolved config."""
    changed = "override" in job.resolved.origins.values()
    config = f"CONFIG={job.run.config if changed else job.resolved.path}"
    return [f"make infer {config}", f"make eval {config}", f"make merge {config}"]


def run_rank(path: str, overrides: list[str], *, probe_only: bool = False) -> None:
    """One rank of a run that accelerate, torchrun or plain python started; rank 0 holds the run directory if no one does yet.

    Every rank loads data and plan before any process group exists: the first to get there tokenises, the others wait on a file.
    """
    resolved = load_job_config(path, overrides)
    require_packages(resolved.config)
    run = open_run(resolved.config.output.dir, resolved.config.output.name)
    launched_by_us = PLAN_VARIABLE in os.environ  # it holds the run directory, has made the plan, and speaks at the end
    alone = not launched_by_us and is_main_rank()
    with hold_run(run) if alone else nullcontext(), quiet_libraries(run.log):
        job = prepare_job(resolved, processes=world_size(), progress=False)
        from sft_play.train.group import agree_on_files, agree_on_plan, process_group

        with process_group(job):
            job = agree_on_files(job if launched_by_us else agree_on_plan(job))
            summary = probe_here(job) if probe_only else train_here(job)
        if alone and not probe_only:
            console().print(closing_screen(summary, None, places(job), next_commands(job)))
