"""Runs one rank of a launched run (scripts/train_distributed.py)."""

from contextlib import nullcontext

from sft_play.builtin.demo import materialise
from sft_play.commands.probe import probe_here
from sft_play.commands.report import end_reported
from sft_play.commands.train import close, require_packages, train_here
from sft_play.config.load import load_config
from sft_play.job import prepare_job
from sft_play.launch.ranks import RankEnvironment
from sft_play.runlog import hold_run, open_run
from sft_play.ui.console import quiet_libraries
from sft_play.ui.progress import spinner


def run_rank(path: str, overrides: list[str], ranks: RankEnvironment, *, probe_only: bool = False) -> None:
    """Runs one rank of a run that was started by accelerate, torchrun or plain python.

    Every rank loads data and plan before any process group exists: the first one tokenizes, the others wait
    for a file lock. Rank 0 holds the run directory if our launcher does not. With `probe_only`, the largest
    batch is measured and nothing trained.
    """
    resolved = materialise(load_config(path, overrides))
    require_packages(resolved.config)
    run = open_run(resolved.config.output.dir, resolved.config.output.name, ranks.rank)
    reports = ranks.is_main and not ranks.launched_by_us
    with hold_run(run) if reports else nullcontext(), quiet_libraries(run.log, silent=not ranks.is_main):
        with spinner("loading the data, and the rest of the libraries"):
            job = prepare_job(
                resolved,
                processes=ranks.world_size,
                machines=ranks.world_size // ranks.local_world_size,
                ranks=ranks,
                progress=False,
            )
            from sft_play.train.ranks import agree_on_files, agree_on_plan, process_group, with_known_exchange

        with end_reported(job.run, job.config, here=reports and not probe_only):
            with process_group(job):
                job = agree_on_files(job if ranks.launched_by_us else agree_on_plan(job))
                job = with_known_exchange(job)
                probe_here(job) if probe_only else train_here(job)
            if reports and not probe_only:
                close(job)
