"""A two-node SLURM on this machine: munged, slurmctld and a slurmd per node, with all state in one folder."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from sft_play.launch.nodes import free_port
from tests.conftest import REPOSITORY

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")

# cred_expire: a requeued job waits until the credential of its earlier start has expired, two minutes by
# default. GraceTime: the time between the signal and the end when a job of partition `high` takes the nodes
# of one in `low`. The GPUs are counted by SLURM only, so that a node gets two processes, which find none.
CONFIG = """\
ClusterName=two
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=0,bf_interval=2
MpiDefault=none
ReturnToService=2
KillWait=20
SlurmdTimeout=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=4000 Gres=gpu:2
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=4000 Gres=gpu:2
PartitionName=low Nodes=node1,node2 Default=YES PriorityTier=1 GraceTime=60 MaxTime=60 OverTimeLimit=0
PartitionName=high Nodes=node1,node2 PriorityTier=10 MaxTime=60
"""


def missing() -> str | None:
    """Why there can be no SLURM here; None if there can."""
    if os.geteuid() != 0:
        return "needs root"
    absent = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    return f"{', '.join(absent)} not installed: make test-cluster" if absent else None


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


class Slurm:
    """Its commands, in its environment."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment
        self.daemons: dict[str, subprocess.Popen] = {}

    def start(self, name: str, *command: str) -> None:
        log = (self.folder / f"{name}.out").open("w")
        command = (
            sys.executable,
            "-m",
            "sft_play.machine.process",
            *command,
        )  # ends with the tests, however they end
        self.daemons[name] = subprocess.Popen(
            command, env=self.environment, stdout=log, stderr=log, start_new_session=True
        )

    def run(self, *command: str, check: bool = True, cwd: Path | None = None) -> subprocess.CompletedProcess:
        done = subprocess.run(
            command, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=60
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done

    def job(self, job_id: str) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        words = self.run("scontrol", "show", "job", "--oneliner", job_id).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job_id: str, *states: str, timeout_s: float = 120, restarts: int = 0) -> dict[str, str]:
        """Waits for a state of the job and returns its fields."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            job = self.job(job_id)
            if job["JobState"] in states and int(job["Restarts"]) >= restarts:
                return job
            time.sleep(0.3)
        raise AssertionError(
            f"job {job_id} is {job['JobState']} ({job['Reason']}) after {timeout_s} s, not {states}"
        )

    def processes_of(self, node: int) -> list[psutil.Process]:
        """What SLURM runs on a node for a job, and the daemon of that step."""
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                environment = process.environ()
                here = environment.get("SLURM_CONF") == self.environment["SLURM_CONF"]
                if here and environment.get("SLURMD_NODENAME") == f"node{node}":
                    found.append(process)
        return found + list(
            {process.parent() for process in found if process.parent().name().startswith("slurmstepd")}
        )


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[Slurm]:
    """The cluster for as long as the block runs; nothing of it is left behind."""
    ports = [free_port() for _ in range(3)]
    host = os.uname().nodename.partition(".")[0]
    for name in ("state", "spool.node1", "spool.node2"):
        (folder / name).mkdir()
    conf = folder / "slurm.conf"
    (folder / "gres.conf").write_text("AutoDetect=off\nName=gpu File=/dev/null,/dev/zero\n")
    first_job = 10**6 + os.getpid() % 10**6 * 50  # no log of another cluster has its number
    conf.write_text(CONFIG.format(folder=folder, host=host, ports=ports, first_job=first_job))
    key = folder / "munge.key-file"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    slurm = Slurm(
        folder, {**os.environ, "SLURM_CONF": str(conf), "PATH": _path(), "PYTHONPATH": str(REPOSITORY)}
    )
    munge = [
        f"--{name}={folder}/munge.{name}"
        for name in ("socket", "key-file", "log-file", "pid-file", "seed-file")
    ]
    try:
        slurm.start("munged", "munged", "--foreground", "--force", *munge)
        _until(lambda: (folder / "munge.socket").exists(), "munged")
        slurm.start("slurmctld", "slurmctld", "-D", "-i")
        for node in (1, 2):
            slurm.start(f"slurmd{node}", "slurmd", "-D", "-N", f"node{node}")
        idle = ("sinfo", "--noheader", "--Node", "--partition=low", "--format=%T")
        _until(lambda: slurm.run(*idle, check=False).stdout.split() == ["idle", "idle"], "the nodes")
        yield slurm
    finally:
        _end(slurm)


def _until(ready, what: str, timeout_s: float = 40) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline, f"{what} did not come up"
        time.sleep(0.2)


def _end(slurm: Slurm) -> None:
    """Jobs first, then the daemons, then whatever still carries the cluster's environment."""
    if "slurmctld" in slurm.daemons:
        with contextlib.suppress(subprocess.SubprocessError, OSError):
            slurm.run("scancel", "--signal=KILL", "--full", "--state=RUNNING", "--user=root", check=False)
            slurm.run("scancel", "--user=root", check=False)
    for daemon in reversed(slurm.daemons.values()):
        with contextlib.suppress(OSError):
            daemon.send_signal(signal.SIGTERM)
    for daemon in slurm.daemons.values():
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
    for process in [*slurm.processes_of(1), *slurm.processes_of(2)]:
        with contextlib.suppress(psutil.Error):
            process.kill()
