"""`sft-play probe`: measures the plan at the largest batch of the run, and trains nothing."""

from dataclasses import asdict
from typing import Any

from sft_play.commands.train import launch_ranks, opened_job, with_flags
from sft_play.config.load import ResolvedConfig
from sft_play.errors import ConfigError
from sft_play.job import Job
from sft_play.machine.process import importing_libraries
from sft_play.runlog import read_json
from sft_play.spelling import var


def probe_command(resolved: ResolvedConfig, *, processes: int, engine: str | None) -> dict[str, Any]:
    """Prepares, plans and probes; an earlier run of the same name is left as it is. Errors as in training.

    Returns {"plan": as in `sft-play plan --json`, "probe": the fields of a ProbeResult}.
    """
    resolved = with_flags(resolved, engine, resume=False)
    with opened_job(resolved, processes) as job:
        if job.config.train.probe is False:
            raise ConfigError(
                "train.probe=false leaves nothing to measure; remove it, or add "
                + var(ARGS="train.probe=true")
            )
        if job.plan.sharing.world_size == 1:
            from sft_play.train.ranks import process_group

            with process_group(job):
                probe_here(job)
        else:
            launch_ranks(job, flags=["--probe"])
        return read_json(job.run.probe)


def probe_here(job: Job) -> None:
    """Probes in this process; the main rank writes the result into the run directory."""
    with importing_libraries():
        from sft_play.train.run import settled_session

    session, probed = settled_session(job)
    if job.ranks.is_main:
        result = asdict(probed) if probed else None
        job.run.write_json(job.run.probe, {"plan": session.job.plan.to_json(), "probe": result})
