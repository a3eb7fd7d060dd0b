"""A run as a SLURM job: configs/slurm/train.sbatch with the values filled in, handed to sbatch."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sft_play.errors import ConfigError, LaunchError, StorageError
from sft_play.launch.accelerate import REPOSITORY
from sft_play.launch.nodes import DEFAULT_PORT, SOMEONES_ADDRESS, commands_for, make_words, whole_number

TEMPLATE = REPOSITORY / "configs" / "slurm" / "train.sbatch"
LOGS = Path("logs")


@dataclass(frozen=True)
class SlurmJob:
    """What a job asks for; texts are as typed, None or "" where nothing was said."""

    nodes: int
    gpus: int | None  # on each node; 0: none, one process on the CPU; None: whatever the node shows
    name: str
    partition: str | None = None
    time: str | None = None
    account: str | None = None
    more: str | None = None  # further words for sbatch

    @property
    def processes(self) -> int:
        """On each node; 0: one for each GPU there."""
        return {None: 0, 0: 1}.get(self.gpus, self.gpus or 0)


def read_job(nodes: str | None, gpus: str | None, name: str, **rest: str | None) -> SlurmJob:
    """Checks the numbers.

    Raises:
        ConfigError: a number is none, or out of range.
    """
    count = whole_number("NODES", nodes or "1", 1)
    return SlurmJob(count, whole_number("NGPU", gpus, 0) if gpus else None, re.sub(r"[^\w.-]", "-", name), **rest)


def sbatch_options(job: SlurmJob) -> dict[str, str]:
    """What is set in the #SBATCH lines."""
    values = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "gres": f"gpu:{job.gpus}" if job.gpus else None,
        "partition": job.partition,
        "time": job.time,
        "account": job.account,
    }
    return {name: value for name, value in values.items() if value}


def batch_file(template: str, job: SlurmJob, *, config: str, engine: str | None, overrides: Sequence[str], python: str) -> str:
    """The template with its #SBATCH options and its variables replaced; pure.

    Raises:
        LaunchError: a variable is not in the template.
    """
    text = template
    for name, value in sbatch_options(job).items():
        if "\n" in value:
            raise ConfigError(f"{name}: {value!r} has more than one line")
        line = f"#SBATCH --{name}={shlex.quote(value)}"
        text, found = _with_line(text, f"#SBATCH --{name}=", line)
        if not found:
            text = text.replace("#SBATCH", f"{line}\n#SBATCH", 1)
    variables = {
        "CONFIG": shlex.quote(config),
        "ENGINE": engine or "",
        "PROCESSES": str(job.processes),
        "SETTINGS": f"({shlex.join(overrides)})",
        "REPOSITORY": shlex.quote(str(REPOSITORY)),
        "PYTHON": shlex.quote(python),
    }
    for name, value in variables.items():
        text, found = _with_line(text, f"{name}=", f"{name}={value}")
        if found != 1:
            raise LaunchError(f"{TEMPLATE} has no line {name}=...; restore it with git checkout")
    return text


def _with_line(text: str, start: str, line: str) -> tuple[str, int]:
    """`line` in place of each line that starts so; and how many there were."""
    lines = text.split("\n")
    return "\n".join(line if old.startswith(start) else old for old in lines), sum(old.startswith(start) for old in lines)


def sbatch_command(file: Path, job: SlurmJob) -> list[str]:
    """The command line of sbatch."""
    return ["sbatch", "--parsable", *shlex.split(job.more or ""), str(file)]


def submit(job: SlurmJob, *, config: str, engine: str | None, overrides: Sequence[str]) -> str:
    """Writes logs/<name>.sbatch, submits it and returns the job id.

    Raises:
        LaunchError: there is no sbatch (the message has the command of each machine instead), or it refused the job.
        StorageError: the file cannot be written.
    """
    if shutil.which("sbatch") is None:
        words = make_words(config, overrides, job.processes, engine)
        commands = commands_for(job.nodes, SOMEONES_ADDRESS, DEFAULT_PORT, words)
        raise LaunchError("\n".join(["sbatch is not on the PATH: no SLURM here. Without it, type on each machine:", *commands]))
    text = batch_file(
        TEMPLATE.read_text(encoding="utf-8"), job, config=config, engine=engine, overrides=overrides, python=sys.executable
    )
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
    """What sbatch says, as one sentence."""
    lines = [line.partition("error: ")[2] or line for line in errors.splitlines() if line.strip()]
    return f"sbatch refused the job: {'; '.join(lines) or 'no reason given'}"


def told(job_id: str, job: SlurmJob) -> str:
    """What a person needs to know of a submitted job."""
    each = f"{job.gpus} GPUs" if job.gpus else "one process on the CPU" if job.gpus == 0 else "all GPUs that it has"
    rows: Mapping[str, str] = {
        "log": f"{LOGS}/train_{job_id}.out",
        "errors": f"{LOGS}/train_{job_id}.err",
        "batch file": f"{LOGS}/{job.name}.sbatch",
        "watch": f"squeue --job {job_id}; tail -F {LOGS}/train_{job_id}.out",
        "cancel": f"scancel {job_id}",
    }
    lines = [f"  {name:<10}  {value}" for name, value in rows.items()]
    return "\n".join([f"job {job_id}: {job.nodes} node{'s' if job.nodes > 1 else ''}, {each} on each", *lines])
