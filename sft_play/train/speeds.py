"""Where a run keeps how long the steps of its plans took, for the next plan."""

from pathlib import Path

from sft_play.job import Job
from sft_play.planning.budget import training_device
from sft_play.planning.speed.devices import profile_of
from sft_play.planning.speed.measured_speed import Timing, speed_path, write_times
from sft_play.sizing.facts.architecture import text_of


def keep_times(job: Job, *timed: Timing) -> None:
    """Keeps what plans took that were timed in turn, on the main rank; the first of them is trained."""
    if job.ranks.is_main and timed:
        write_times(speed_file(job), timed)


def speed_file(job: Job) -> Path:
    """Where the speeds of the plans that a job may have are kept."""
    profile = profile_of(job.machine, job.plan.sharing.world_size)
    return speed_path(
        text_of(job.architecture), training_device(job.machine).name, job.config, job.plan, profile
    )
