"""A run before training: its directory, data and plan, and what they were derived from."""

import contextlib
import hashlib
import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_play import __version__
from sft_play.cache import cache_dir
from sft_play.config.load import ResolvedConfig, dump_resolved
from sft_play.config.schema import RunConfig
from sft_play.data.prepare import PreparedData
from sft_play.errors import DoesNotFitError, LaunchError
from sft_play.files import write_atomic
from sft_play.fingerprints import code_commit, installed_versions
from sft_play.hooks import NO_HOOKS, Hooks
from sft_play.launch.ranks import SINGLE_PROCESS, RankEnvironment
from sft_play.machine.cuda import require_usable, why_left_out
from sft_play.machine.gpus import Machine, detect
from sft_play.model.load import load_data
from sft_play.model.weights.base_files import keep_base_files
from sft_play.plan import Plan
from sft_play.planning.answers.advice import changed_command, plan_or_advise
from sft_play.planning.answers.resumed import earlier_plan, resumed_plan
from sft_play.planning.planner import Accept, fastest_plan
from sft_play.planning.request import Request
from sft_play.planning.rows.facts import DataFacts
from sft_play.planning.speed.devices import ensure_profile
from sft_play.report.layout import make_command
from sft_play.runlog import RunDir, open_run, read_json, set_aside_earlier_run
from sft_play.sizing.facts.architecture import Architecture
from sft_play.spelling import make, var
from sft_play.start import part, run_begins
from sft_play.ui.console import console, warn
from sft_play.ui.progress import PLANNING, spinner

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Job:
    """One run, ready to be trained."""

    resolved: ResolvedConfig
    run: RunDir
    architecture: "PretrainedConfig"
    tokenizer: "PreTrainedTokenizerBase"
    data: PreparedData
    machine: Machine
    plan: Plan
    ranks: RankEnvironment = SINGLE_PROCESS
    checkpoint: Path | None = None  # what the run resumes from
    hooks: Hooks = NO_HOOKS  # of a script that trains in this process

    @property
    def config(self) -> RunConfig:
        """The settings."""
        return self.resolved.config

    @property
    def checkpoint_parts(self) -> int:
        """Number of processes that save their part of a checkpoint into this run directory.

        Only those of this machine if the directory is not shared.
        """
        return self.plan.sharing.shards if self.run.shared else self.ranks.local_world_size

    @property
    def keeps_files(self) -> bool:
        """Whether this process writes the run directory: the main rank, or the first of each unshared one."""
        return self.ranks.is_main or (not self.run.shared and self.ranks.local_rank == 0)

    @property
    def resume_command(self) -> str:
        """What continues from the latest checkpoint, on as many processes of this machine."""
        if self.ranks.spans_machines:
            return f"the same command on each machine, with {var(ARGS='train.resume=auto')}"
        return self.run.resume_command(self.ranks.local_world_size)


def prepare_job(
    resolved: ResolvedConfig,
    *,
    processes: int,
    machines: int = 1,
    ranks: RankEnvironment = SINGLE_PROCESS,
    progress: bool = True,
) -> Job:
    """Loads the data, tokenized or from the cache, and plans the run unless our launcher has done so."""
    config = resolved.config
    # one process for all of a machine: our launcher, which has just done so, or the first rank
    for_all = not ranks.launched_by_us and ranks.local_rank == 0
    run_begins()
    if for_all:
        require_usable(machine := _machine_of(processes // machines))
        if said := why_left_out(machine):
            warn(said)
    with part("data"):
        loaded = load_data(config, progress=progress, hashes=for_all, trained=True)
    run = open_run(config.output.dir, config.output.name, ranks.rank)
    machine = _machine_of(processes // machines)  # again: the data may have taken a while
    if ranks.plan_file:
        plan = Plan.from_json(json.loads(ranks.plan_file.read_text(encoding="utf-8")))
    else:
        if ranks.world_size == 1:
            with part("profile"):
                ensure_profile(config, machine, processes)
        with spinner(PLANNING), part("plan"):
            architecture = Architecture.of(loaded.architecture)
            facts = DataFacts.of(loaded.rows, config, architecture.facts.look)
            request = Request(config, architecture, facts, machine, processes, machines)
            earlier = earlier_plan(config, run.path)
            resumed = resumed_plan(request, earlier) if earlier else None
            plan = resumed or plan_or_advise(request, partial(changed_command, resolved))
    return Job(resolved, run, loaded.architecture, loaded.tokenizer, loaded.rows, machine, plan, ranks)


def _machine_of(processes: int) -> Machine:
    """This machine, with the GPUs that so many of its processes train on: CUDA's first ones."""
    machine = detect()
    return replace(machine, gpus=machine.gpus[:processes])


def job_digest(job: Job) -> str:
    """A digest of settings and data that does not depend on where a machine keeps its cache and its runs."""
    settings = job.config.model_dump_json(exclude={"output": {"dir"}}).replace(str(cache_dir()), "")
    return hashlib.sha256(f"{settings} {job.data.cache_path.name}".encode()).hexdigest()


def agreed_plan(offers: Sequence[tuple[str, dict[str, Any]]]) -> Plan:
    """One plan for all processes: that of the one with the smallest budget, since free memory differs.

    `offers` are the job digest and the plan, as JSON, of each.

    Raises:
        LaunchError: they were given different settings or data, or only some of them have GPUs.
    """
    if len({digest for digest, _ in offers}) > 1:
        raise LaunchError(
            "the processes were given different settings or data; start all with the same config and "
            "overrides, and with the same versions of this code and of the libraries"
        )
    plans = [Plan.from_json(tree) for _, tree in offers]
    if len({plan.device for plan in plans}) > 1:
        raise LaunchError(
            f"only some of the processes found a GPU; compare `{make('gpu-info')}` on the machines"
        )
    return min(plans, key=lambda plan: plan.memory.budget_bytes if plan.memory else 0)


def plan_again(job: Job, accept: Accept) -> Plan:
    """The fastest plan that `accept` allows, with engine, offload, processes, groups and budget of the job's.

    Raises DoesNotFitError if there is none.
    """
    earlier, request = job.plan, request_of(job)
    return fastest_plan(request, lambda draft: _shared_as(draft) == _shared_as(earlier) and accept(draft))


def request_of(job: Job) -> Request:
    """What is asked of the planner for a job, with processes, groups and budget of its plan."""
    plan, architecture = job.plan, Architecture.of(job.architecture)
    return Request(
        job.config,
        architecture,
        DataFacts.of(job.data, job.config, architecture.facts.look),
        job.machine,
        plan.sharing.world_size,
        plan.sharing.machines,
        plan.memory.budget_bytes if plan.memory else None,
    ).in_groups_as(plan.sharing)


def _shared_as(plan: Plan) -> tuple[str, str]:
    return plan.sharing.engine, plan.sharing.offload


def find_plan(job: Job, accept: Accept) -> Plan | None:
    """As `plan_again`; None if there is none."""
    with contextlib.suppress(DoesNotFitError):
        return plan_again(job, accept)
    return None


def takes_less(plan: Plan) -> Callable[[Plan], bool]:
    """Tells of another plan whether it needs less memory than this one."""

    def less(other: Plan) -> bool:
        if other.rows.most_tokens == plan.rows.most_tokens:
            return other.activations.saved > plan.activations.saved
        return other.rows.most_tokens < plan.rows.most_tokens

    return less


def begin_run(job: Job) -> None:
    """Moves an earlier run of the same name aside and writes what this one begins with.

    Called right before the first step, so that whatever fails before leaves the earlier run as it is.
    """
    if not job.keeps_files:
        return
    earlier = set_aside_earlier_run(job.run) if job.config.train.resume == "never" else None
    if earlier:
        console().print(f"  an earlier run of this name was moved to {earlier}", style="dim")
    write_atomic(job.run.config, dump_resolved(job.resolved))
    job.run.write_json(job.run.plan, job.plan.to_json())
    job.run.write_json(job.run.data, {"fingerprint": job.data.cache_path.name, **job.data.stats})
    job.run.write_json(job.run.environment, _started(job) | environment_of(job.machine))
    if job.checkpoint is None or not job.run.base.exists():
        keep_base_files(job.config.model, job.run)


def _started(job: Job) -> dict[str, object]:
    """When and how the run was started; of one that is resumed, also when that was."""
    now, commit = f"{datetime.now():%Y-%m-%d %H:%M}", code_commit()
    first = read_json(job.run.environment) if job.checkpoint else {}
    if "command" not in first:
        return {"started": now, "commit": commit, "command": _command(job)}
    return {"started": first.get("started"), "resumed": now, "commit": commit, "command": first["command"]}


def _command(job: Job) -> str:
    """What starts such a run; an engine that a target of make sets is among the overrides."""
    plan, resolved = job.plan, job.resolved
    here = plan.sharing.world_size // plan.sharing.machines
    sizes = {
        "NODES": plan.sharing.machines if plan.sharing.machines > 1 else None,
        "NGPU": here if here > 1 else None,
    }
    target = "train-multinode" if plan.sharing.machines > 1 else "train"
    return make_command(target, resolved.path, resolved.overrides, **sizes)


def environment_of(machine: Machine) -> dict[str, object]:
    """Versions and hardware, without what identifies one machine among others of its kind."""
    host = machine.host
    return {
        "versions": {"sft_play": __version__, **installed_versions()},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "gpus": [
            {"name": gpu.name, "total_bytes": gpu.total_bytes, "link": gpu.link} for gpu in machine.gpus
        ],
        "driver": machine.driver,
        "cuda": machine.cuda,
        "cpu": host.cpu_model,
        "cpu_cores": host.cpu_cores,
        "ram_bytes": host.ram_total_bytes,
    }
