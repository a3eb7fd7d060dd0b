"""A run as a SLURM job: fills in configs/slurm/train.sbatch and submits it with sbatch."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sft_play.errors import ConfigError, LaunchError, StorageError
from sft_play.launch.nodes import ADDRESS_PLACEHOLDER, DEFAULT_PORT, commands_for, whole_number
from sft_play.report.layout import make_settings
from sft_play.resources import CONFIGS, SCRIPTS
from sft_play.spelling import var
from sft_play.units import counted

TEMPLATE = CONFIGS / "slurm" / "train.sbatch"
LOGS = Path("logs")


@dataclass(frozen=True)
class SlurmJob:
    """The resources of a job; strings are as typed, None or "" if not given."""

    nodes: int
    gpus: int | None  # per node; 0 for one process on the CPU; None for all visible GPUs of the node
    name: str
    partition: str | None = None
    time: str | None = None
    account: str | None = None
    more: str | None = None  # further options of sbatch

    @property
    def processes(self) -> int:
        """Processes per node; 0 for one on each visible GPU."""
        return 0 if self.gpus is None else max(1, self.gpus)


def read_job(nodes: str | None, gpus: str | None, name: str, **rest: str | None) -> SlurmJob:
    """The job for NODES and NGPU as typed, and the other fields; ConfigError if they are no numbers."""
    count = whole_number(var(NODES=nodes), nodes or "1", 1)
    per_node = whole_number(var(NGPU=gpus), gpus, 0) if gpus else None
    return SlurmJob(count, per_node, re.sub(r"[^\w.-]", "-", name), **rest)


def batch_file(
    template: str, job: SlurmJob, *, config: str, engine: str | None, overrides: Sequence[str], python: str
) -> str:
    """The text of configs/slurm/train.sbatch with its #SBATCH options and its variables replaced; pure.

    Raises:
        ConfigError: an option has more than one line.
        LaunchError: a variable is missing from the template.
    """
    options = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "gres": f"gpu:{job.gpus}" if job.gpus else None,
        "partition": job.partition,
        "time": job.time,
        "account": job.account,
    }
    replaced = {f"#SBATCH --{name}=": shlex.quote(value) for name, value in options.items() if value}
    for start, value in replaced.items():
        if "\n" in value:
            raise ConfigError(f"{start.removeprefix('#SBATCH ')}{value} has more than one line")
    variables = {
        "CONFIG": shlex.quote(config),
        "ENGINE": engine or "",
        "PROCESSES": str(job.processes),
        "SETTINGS": f"({shlex.join(overrides)})",
        "SCRIPTS": shlex.quote(str(SCRIPTS)),
        "PYTHON": shlex.quote(python),
    }
    replaced |= {f"{name}=": value for name, value in variables.items()}
    # Line by line and only once, so that no value is mistaken for a line of the template.
    lines = []
    for line in template.split("\n"):
        start = f"{line.partition('=')[0]}="
        lines.append(f"{start}{replaced.pop(start)}" if start in replaced else line)
    missing = [start for start in replaced if not start.startswith("#SBATCH")]
    if missing:
        raise LaunchError(
            f"{TEMPLATE} has no line {missing[0]}...; restore it with `git checkout -- {TEMPLATE}`, or "
            "install SFT-Play again"
        )
    first = next(number for number, line in enumerate(lines) if line.startswith("#SBATCH"))
    lines[first:first] = [f"{start}{value}" for start, value in replaced.items()]
    return "\n".join(lines)


def sbatch_command(file: Path, job: SlurmJob) -> list[str]:
    """The command line of sbatch; ConfigError if the further options have an open quotation mark."""
    try:
        more = shlex.split(job.more or "")
    except ValueError as error:
        raise ConfigError(f"{var(SBATCH=job.more)}: {str(error).lower()}") from None
    return ["sbatch", "--parsable", *more, str(file)]


def submit(job: SlurmJob, *, config: str, engine: str | None, overrides: Sequence[str]) -> str:
    """Writes logs/<name>.sbatch for the config with its overrides, submits it and returns the job id.

    Raises:
        LaunchError: sbatch rejected the job, or does not exist; the message then lists the command for each
            machine.
        StorageError: the file cannot be written.
    """
    if shutil.which("sbatch") is None:
        settings = make_settings(config, overrides, NGPU=job.processes, ENGINE=engine)
        commands = commands_for(job.nodes, ADDRESS_PLACEHOLDER, DEFAULT_PORT, settings)
        problem = "sbatch is not on the PATH, so there is no SLURM here. Without SLURM, run on each machine:"
        raise LaunchError("\n".join([problem, *commands]))
    template = TEMPLATE.read_text(encoding="utf-8")
    text = batch_file(template, job, config=config, engine=engine, overrides=overrides, python=sys.executable)
    file = LOGS / f"{job.name}.sbatch"
    try:
        LOGS.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{file} cannot be written: {error.strerror}") from None
    done = subprocess.run(sbatch_command(file, job), capture_output=True, text=True)
    if done.returncode:
        raise LaunchError(refusal(done.stderr))
    return done.stdout.strip().split(";")[0]


def refusal(errors: str) -> str:
    """The error messages of sbatch as one sentence."""
    lines = [line.partition("error: ")[2] or line for line in errors.splitlines() if line.strip()]
    return f"sbatch rejected the job: {'; '.join(lines) or 'no reason given'}"


def submission_summary(job_id: str, job: SlurmJob) -> str:
    """A submitted job for the console: its resources, its logs, how to watch and to cancel it."""
    each = f"{counted(job.gpus or 0, 'GPU')} per node"
    if not job.gpus:
        each = "all GPUs of each node" if job.gpus is None else "one process on the CPU of each node"
    rows = {
        "log": f"{LOGS}/train_{job_id}.out",
        "errors": f"{LOGS}/train_{job_id}.err",
        "batch file": f"{LOGS}/{job.name}.sbatch",
        "watch": f"squeue --job {job_id}; tail -F {LOGS}/train_{job_id}.out",
        "cancel": f"scancel {job_id}",
    }
    lines = [f"  {name:<10}  {value}" for name, value in rows.items()]
    return "\n".join([f"job {job_id}: {counted(job.nodes, 'node')}, {each}", *lines])
