"""`make train-slurm` with the shipped batch file on two nodes: finished, interrupted, cancelled, broken."""

import contextlib
import re
import shutil
import time
from pathlib import Path

import psutil
import pytest

from sft_play.runlog import RunDir, read_json, read_metrics
from tests.cluster import slurm as cluster
from tests.cluster.conftest import assert_same_curve
from tests.cluster.hosts import make_command
from tests.cluster.slurm import Slurm, two_nodes
from tests.conftest import REPOSITORY
from tests.integration.cli import environment, gone

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(cluster.missing() is not None, reason=str(cluster.missing())),
]

BATCH = "train.batch_size=2"
LONG = (
    f"{BATCH} train.max_steps=400 train.save_steps=200 train.eval_steps=200 train.learning_rate=1e-3 "
    "eval.generate=false"
)
ENDLESS = f"{BATCH} train.max_steps=20000 train.save_steps=10000 eval.generate=false"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    with two_nodes(folder) as running:
        cache = str(tmp_path_factory.getbasetemp() / "cache")
        running.environment |= environment(
            SFT_PLAY_CACHE=cache,
            SLURM_CONF=running.environment["SLURM_CONF"],
            PATH=running.environment["PATH"],
        )
        yield running


@pytest.fixture
def submit(slurm, config):
    """`make train-slurm` on both nodes; returns the job id, and removes its logs at the end."""
    written: list[Path] = []

    def send(name: str, settings: str, engine: str = "ddp", gpus: int = 0) -> str:
        run = (f"CONFIG={config}", f"ARGS={settings} output.name={name}", f"ENGINE={engine}")
        words = ("train-slurm", "NODES=2", f"NGPU={gpus}", "TIME=20", *run)
        done = slurm.run(*make_command(*words), cwd=REPOSITORY)
        found = re.search(r"squeue --job (\d+)", done.stdout)
        assert found, done.stdout
        job_id = found[1]
        written.extend(
            REPOSITORY / "logs" / file
            for file in (f"{name}.sbatch", f"train_{job_id}.out", f"train_{job_id}.err")
        )
        for said in (
            f"train_{job_id}.out",
            f"train_{job_id}.err",
            f"scancel {job_id}",
        ):
            assert said in done.stdout
        return job_id

    yield send
    slurm.run("scancel", "--user=root", check=False)
    for path in written:
        path.unlink(missing_ok=True)


def logs(job_id: str) -> str:
    return "".join((REPOSITORY / "logs" / f"train_{job_id}.{end}").read_text() for end in ("out", "err"))


def wait_for_step(slurm: Slurm, job_id: str, run: RunDir, step: int, timeout_s: float = 100) -> None:
    deadline = time.monotonic() + timeout_s
    while max((line["step"] for line in read_metrics(run)), default=0) < step:
        state = slurm.job(job_id)["JobState"]
        assert state in ("PENDING", "RUNNING") and time.monotonic() < deadline, f"{state}\n{logs(job_id)}"
        time.sleep(0.2)


@pytest.mark.slow
def test_a_job_runs_on_two_nodes_to_the_end(slurm, submit, config, alone):
    job_id = submit("whole", BATCH)
    job = slurm.wait(job_id, "COMPLETED", "FAILED")
    assert job["JobState"] == "COMPLETED" and job["NumNodes"] == "2", logs(job_id)
    said = logs(job_id)
    assert said.count("Number of processes: 2") == 1 and said.count("machine 1 joined") == 1, said
    assert_same_curve(RunDir(config.parent / "runs" / "whole"), alone(BATCH, "eval.generate=false"))


@pytest.mark.slow
def test_each_node_holds_a_model_once_divided_among_its_processes(slurm, submit, config, alone):
    """FSDP2, with gradients that are reduced over the nodes."""
    job_id = submit("divided", BATCH, engine="fsdp2", gpus=2)
    job = slurm.wait(job_id, "COMPLETED", "FAILED", timeout_s=300)
    assert job["JobState"] == "COMPLETED", logs(job_id)
    run = RunDir(config.parent / "runs" / "divided")
    plan = read_json(run.plan)["plan"]
    assert [plan[key] for key in ("engine", "world_size", "replicas")] == ["fsdp2", 4, 2]
    assert_same_curve(run, alone(BATCH, "eval.generate=false"))


def test_an_interrupted_job_goes_back_into_the_queue_and_on_from_its_checkpoint(slurm, submit, config, alone):
    """By the signal before the time limit, then by preemption; the result equals an uninterrupted run."""
    run = RunDir(config.parent / "runs" / "moved")
    job_id = submit("moved", LONG)
    wait_for_step(slurm, job_id, run, 20)
    slurm.run("scancel", "--batch", "--signal=USR1", job_id)  # what #SBATCH --signal=B:USR1@300 does
    slurm.wait(job_id, "PENDING", "RUNNING", restarts=1)
    stopped = read_json(run.summary)
    assert stopped["status"] == "interrupted" and 20 <= stopped["optimizer_steps"] < 400

    slurm.wait(job_id, "RUNNING", restarts=1)
    wait_for_step(slurm, job_id, run, stopped["optimizer_steps"] + 20)
    urgent = ("--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    other = slurm.run("sbatch", "--parsable", *urgent).stdout.strip()
    slurm.wait(other, "COMPLETED")
    slurm.wait(job_id, "PENDING", "RUNNING", restarts=2)

    job = slurm.wait(job_id, "COMPLETED", "FAILED", restarts=2)
    assert job["JobState"] == "COMPLETED" and job["Restarts"] == "2", logs(job_id)
    assert logs(job_id).count("resuming from") >= 2
    assert_same_curve(run, alone(*LONG.split()))


@pytest.mark.slow
def test_a_cancelled_job_stays_cancelled_and_leaves_nobody_behind(slurm, submit, config):
    job_id = submit("cancelled", ENDLESS)
    run = RunDir(config.parent / "runs" / "cancelled")
    wait_for_step(slurm, job_id, run, 3)
    ours = [process.pid for node in (1, 2) for process in slurm.processes_of(node)]
    assert len(ours) >= 6  # a launcher, accelerate and a rank on each
    slurm.run("scancel", job_id)
    slurm.wait(job_id, "CANCELLED", timeout_s=30)
    assert gone(ours, within_s=40)
    assert slurm.job(job_id)["JobState"] == "CANCELLED" and slurm.job(job_id)["Restarts"] == "0"
    assert (
        read_json(run.summary)["status"] == "interrupted"
    )  # the time that SLURM gives was enough for a checkpoint


@pytest.mark.slow
def test_a_node_that_is_lost_ends_the_run_and_slurm_gives_it_another_chance(slurm, submit, config):
    """All that runs on the second node is killed at once, SLURM's daemons included."""
    job_id = submit("lost", ENDLESS)
    wait_for_step(slurm, job_id, RunDir(config.parent / "runs" / "lost"), 3)
    launchers = [process for process in slurm.processes_of(1) if "sft_play" in process.cmdline()]
    began = time.monotonic()
    for process in [*slurm.processes_of(2), slurm.daemons["slurmd2"]]:
        with contextlib.suppress(psutil.Error):
            process.kill()
    assert gone([process.pid for process in launchers], within_s=15)
    print(f"lost node: the run on the other one ended after {time.monotonic() - began:.1f} s")
    assert "error: lost the connection to machine 1" in logs(job_id), logs(job_id)
    job = slurm.wait(
        job_id, "PENDING", timeout_s=60, restarts=1
    )  # SLURM misses the node after SlurmdTimeout, here 10 s
    print(f"lost node: the job was back in the queue after {time.monotonic() - began:.1f} s")
    assert job["Restarts"] == "1"
    slurm.start("slurmd2", "slurmd", "-D", "-N", "node2")


@pytest.mark.parametrize(
    ("knob", "said", "status"),
    [
        ("PARTITION=nowhere", "sbatch rejected the job: invalid partition specified: nowhere", 9),
        ("NODES=0", "NODES=0: expected a whole number of at least 1", 2),
        ("NODES=9", "train.effective_batch_size=8 is 8 sequences, fewer than the 9 processes", 2),
    ],
)
def test_what_cannot_be_submitted_is_said_in_one_sentence(slurm, config, knob, said, status):
    done = slurm.run(
        *make_command("train-slurm", "NODES=2", "NGPU=0", f"CONFIG={config}", knob),
        cwd=REPOSITORY,
        check=False,
    )
    assert (
        f"error: {said}" in done.stderr
        and f"Error {status}" in done.stderr
        and "Traceback" not in done.stderr
    )
    (REPOSITORY / "logs" / "one.sbatch").unlink(missing_ok=True)


def test_the_batch_file_can_be_submitted_by_hand(slurm):
    """sbatch's own check of the shipped file, whatever the folder that it is in."""
    file = REPOSITORY / "configs" / "slurm" / "train.sbatch"
    done = slurm.run("sbatch", "--test-only", "--time=10", str(file), "train.max_steps=4", cwd=REPOSITORY)
    assert "to start at" in done.stderr and "using 2 processors" in done.stderr
    assert shutil.which("bash") and slurm.run("bash", "-n", str(file)).stderr == ""
