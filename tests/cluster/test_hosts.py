"""`make train-multinode` on two hosts with addresses of their own, one process on each."""

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from sft_play.runlog import RunDir, read_json, read_metrics
from tests.cluster import hosts
from tests.cluster.conftest import assert_same_curve
from tests.cluster.hosts import finish_both, two_hosts

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(hosts.missing() is not None, reason=str(hosts.missing())),
]

BATCH = "train.batch_size=2"
LONG = f"{BATCH} train.max_steps=4000 train.save_steps=2000 eval.generate=false"


@pytest.fixture
def pair():
    with two_hosts() as both:
        yield both


def wait_for_step(run: RunDir, step: int, processes: list[subprocess.Popen], timeout_s: float = 100) -> None:
    deadline = time.monotonic() + timeout_s
    while max((line["step"] for line in read_metrics(run)), default=0) < step:
        ended = ["".join(process.communicate()) for process in processes if process.poll() is not None]
        assert not ended and time.monotonic() < deadline, "\n".join(ended)
        time.sleep(0.05)


def test_two_hosts_with_one_run_directory_learn_what_one_process_does(pair, config, alone):
    words = (f"CONFIG={config}", "ENGINE=ddp", f"ARGS={BATCH} output.name=ddp")
    done = finish_both([host.train(*words) for host in pair])
    assert [one.code for one in done] == [0, 0], "\n".join(one.out + one.err for one in done)
    for text in (
        "machine 1 joined: host1",
        "Distributed type: MULTI_CPU",
        "Number of processes: 2",
        "exact match",
    ):
        assert done[0].out.count(text) == 1, done[0].out
    assert "the results are on machine 0" in done[1].out and "step 1/8" not in done[1].out
    run = RunDir(config.parent / "runs" / "ddp")
    assert read_json(run.summary)["world_size"] == 2
    assert_same_curve(run, alone(BATCH, "eval.generate=false"))


def test_machine_0_may_be_given_by_a_name_that_is_loopback_to_itself(pair, config, tmp_path):
    """As Debian writes it into /etc/hosts: the others know another address, and could not reach that one."""
    processes = []
    for host, address in zip(pair, ("127.0.1.1", hosts.ADDRESSES[0]), strict=True):
        names = tmp_path / f"hosts{host.number}"
        names.write_text(f"127.0.0.1 localhost\n{address} first\n")
        words = (f"CONFIG={config}", "ENGINE=ddp", f"ARGS={BATCH} output.name=named eval.generate=false")
        processes.append(host.train(*words, "MASTER_ADDR=first", own=(names, Path("/etc/hosts"))))
    done = finish_both(processes)
    assert [one.code for one in done] == [0, 0], "\n".join(one.out + one.err for one in done)


@pytest.mark.slow
def test_two_hosts_with_disks_of_their_own_go_on_from_a_checkpoint_with_zero_2(pair, config, alone, tmp_path):
    """Four steps, then the other four: each host keeps its part of the optimizer state, one the results."""
    runs = config.parent / "runs"
    disks = [tmp_path / "disk0", tmp_path / "disk1"]
    runs.mkdir(exist_ok=True)
    for disk in disks:
        disk.mkdir()
    settings = f"{BATCH} train.save_steps=4 train.eval_steps=4 eval.generate=false output.name=zero"
    words = [f"CONFIG={config}", "ENGINE=deepspeed_z2", f"ARGS={settings}"]
    both = [host.train(*words, own=(disk, runs)) for host, disk in zip(pair, disks, strict=True)]
    first = finish_both(both)
    assert [one.code for one in first] == [0, 0], "\n".join(one.out + one.err for one in first)
    assert_same_curve(RunDir(disks[0] / "zero"), alone(*settings.split()[:-1]))
    for number, disk in enumerate(disks):
        saved = disk / "zero" / "checkpoints" / "checkpoint-4"
        assert [path.name.split("_mp_")[0][-1] for path in saved.glob("global_step4/*_optim_states.pt")] == [
            str(number)
        ]
    # as if the second host had been killed before it published the last one
    shutil.rmtree(disks[1] / "zero" / "checkpoints" / "checkpoint-8")
    assert not (disks[1] / "zero" / "summary.json").exists() and not (disks[1] / "zero" / "adapter").exists()
    words[-1] += " train.resume=auto"
    second = finish_both(
        [host.train(*words, own=(disk, runs)) for host, disk in zip(pair, disks, strict=True)]
    )
    assert [one.code for one in second] == [0, 0], "\n".join(one.out + one.err for one in second)
    assert (
        "resuming from" in second[0].out and "step 5/8" in second[0].out and "step 4/8" not in second[0].out
    )
    assert (disks[0] / "zero" / "checkpoints" / "checkpoint-8.stale").is_dir()
    assert_same_curve(RunDir(disks[0] / "zero"), alone(*settings.split()[:-1]))


@pytest.mark.slow
def test_two_hosts_hold_the_model_once_each_and_go_on_from_their_checkpoint(pair, config, alone):
    """FSDP2 hybrid with two processes on each host: four steps, then the other four."""
    settings = "train.batch_size=1 train.save_steps=4 train.eval_steps=4 eval.generate=false"
    run = RunDir(config.parent / "runs" / "hybrid")
    for resume in ("", "train.resume=auto"):
        words = (f"CONFIG={config}", "ENGINE=fsdp2", "NGPU=2", f"ARGS={settings} output.name=hybrid {resume}")
        done = finish_both([host.train(*words) for host in pair])
        assert [one.code for one in done] == [0, 0], "\n".join(one.out + one.err for one in done)
        assert_same_curve(run, alone(*settings.split()))
        parts = sorted(path.name for path in (run.checkpoints / "checkpoint-4").glob("optimizer_shard_*"))
        assert parts == [f"optimizer_shard_{rank}.safetensors" for rank in (0, 1)]  # the first host's
        shutil.rmtree(
            run.checkpoints / "checkpoint-8"
        )  # as if the hosts had been lost before it was published
    assert "a copy of the model on each of 2 machines" in done[0].out and "resuming from" in done[0].out


@pytest.mark.slow
def test_parts_of_checkpoints_on_disks_of_their_own_are_refused(pair, config, tmp_path):
    (config.parent / "runs").mkdir(exist_ok=True)
    started = []
    for number, host in enumerate(pair):
        disk = tmp_path / f"disk{number}"
        disk.mkdir()
        words = (f"CONFIG={config}", "ENGINE=fsdp2", f"ARGS={BATCH} output.name=parts")
        started.append(host.train(*words, own=(disk, config.parent / "runs")))
    done = finish_both(started)
    said = done[0].out + done[0].err
    assert all(one.code for one in done) and "FSDP2 over several machines needs a run directory" in said, said


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "within_s"), [("kill", 12), ("unplug", 35)])
def test_a_host_that_is_lost_ends_the_other(pair, config, loss, within_s):
    name = f"lost-{loss}"
    words = (f"CONFIG={config}", "ENGINE=ddp", f"ARGS={LONG} output.name={name}")
    processes = [host.train(*words) for host in pair]
    wait_for_step(RunDir(config.parent / "runs" / name), 3, processes)
    began = time.monotonic()
    getattr(pair[1], loss)()
    out, err = processes[0].communicate(timeout=60)
    seconds = time.monotonic() - began
    assert "error: lost the connection to machine 1 (host1)" in err and "Error 9" in err, (out, err)
    assert seconds < within_s
    pair[1].kill()
    processes[1].communicate(timeout=10)
    print(f"{loss}: machine 0 ended after {seconds:.1f} s")


def test_what_fails_on_one_host_is_said_on_both(pair, config, tmp_path):
    """Machine 1 has other rows: known before a process is launched."""
    other = tmp_path / "train.jsonl"
    other.write_text((config.parent / "train.jsonl").read_text().replace("w1", "w2"))
    words = (f"CONFIG={config}", "ENGINE=ddp", f"ARGS={BATCH} output.name=differs")
    processes = [pair[0].train(*words), pair[1].train(*words, own=(other, config.parent / "train.jsonl"))]
    for done in finish_both(processes):
        assert "different settings or data" in done.err and "Error 9" in done.err, done
    assert not (config.parent / "runs" / "differs" / "ranks").exists()
