"""Runs that are killed, or fail, at bad moments: nothing half-written is left, and they go on to the same result."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sft_play.launch import accelerate
from sft_play.manifest import find_damage
from sft_play.runlog import RunDir
from tests.conftest import REPOSITORY
from tests.integration.cli import environment, make_workspace, sft

pytestmark = [pytest.mark.integration, pytest.mark.faults]


def trials(results, **counts: int) -> tuple[dict, list[str]]:
    """The counts that the program writes, and a line for each trial that it ran of these kinds."""
    flags = [word for kind, count in counts.items() for word in (f"--{kind}", str(count))]
    command = [sys.executable, "-m", "tests.stress.kills", *counts, *flags, "--results", results]
    done = subprocess.run(
        command, env=environment(), cwd=REPOSITORY, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    kinds = json.loads((results / "kills.json").read_text())["kinds"]
    return kinds, [line for line in done.stdout.splitlines() if "operation" in line]


def test_a_run_that_is_killed_in_any_phase_goes_on_and_so_do_the_trials(tmp_path):
    _, first = trials(tmp_path, data=1, save=2, result=0)
    kinds, second = trials(tmp_path, save=2, result=1, merge=2)
    assert [len(first), len(second)] == [3, 3]
    counts = {kind: found["trials"] for kind, found in kinds.items()}
    assert counts == {"data": 1, "save": 2, "result": 1, "merge": 2}  # also of a kind that was left out
    for found in kinds.values():
        assert found["went_on_to_the_same_weights"] == found["trials"] and found["wrong"] == []
        assert found["versions"]["torch"] and found["commit"]


def test_processes_that_share_a_model_are_killed_together_and_alone_and_go_on(tmp_path):
    kinds, lines = trials(tmp_path, fsdp2=3, fsdp2_full=3)
    assert [kind["went_on_to_the_same_weights"] for kind in kinds.values()] == [3, 3]
    assert sum("all processes" in line for line in lines) == 2


# Each rank hashes its files between two collectives of a save, and the main rank then those that are left; so
# the calls with these numbers belong to the second save, that of step 4.
SECOND_SAVE = {0: 2, 1: 1}
FAULTY_RANK = """\
import itertools, os, signal, sys
sys.path.insert(0, {repository!r})
from sft_play.machine.process import die_with_parent
die_with_parent()
from sft_play.cli import run_rank
from sft_play.train import checkpoints

hash_files, calls = checkpoints.hash_files, itertools.count()

def fail(*given, **named):
    if next(calls) == {call}:
        {fault}
    return hash_files(*given, **named)

if os.environ["RANK"] == "{rank}":
    checkpoints.hash_files = fail
raise SystemExit(run_rank(sys.argv[1:]))
"""
KILL, RAISE = "os.kill(os.getpid(), signal.SIGKILL)", 'raise ValueError("an injected fault")'
WORDS = ["eval.generate=false", "train.save_steps=2", "train.eval_steps=2", "train.probe=false"]
WORDS += ["train.report_to=[]", "parallel.timeout_s=60", "--processes", "2"]
FOLDER = "größere Läufe, 2 von 3"  # every path of these runs has blanks and letters beyond ASCII


def adapter(run: RunDir) -> bytes:
    return (run.adapter / "adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tiny_model, tmp_path_factory):
    """`undisturbed(engine)`: the adapter of a run that nothing happens to, trained once for each engine."""
    known = {}

    def result(engine: str) -> bytes:
        if engine not in known:
            folder = tmp_path_factory.mktemp(engine) / FOLDER
            config = make_workspace(folder, tiny_model)
            done = sft("train", "--config", config, f"parallel.engine={engine}", *WORDS)
            assert done.code == 0, done.err
            known[engine] = adapter(RunDir(folder / "runs" / "one"))
        return known[engine]

    return result


def goes_on(config: Path, run: RunDir, engine: str, last: int) -> bytes:
    """The adapter of a run that failed after the checkpoint of step `last` and is resumed."""
    found = {path.name for path in run.checkpoints.glob("checkpoint-*")}
    assert found == {f"checkpoint-{step}" for step in range(2, last + 1, 2)} and not run.adapter.exists()
    assert all(find_damage(run.checkpoints / name) is None for name in found)
    done = sft("train", "--config", config, f"parallel.engine={engine}", *WORDS, "train.resume=auto")
    assert done.code == 0 and f"checkpoint-{last}" in done.err + done.out, done.err
    assert not (run.checkpoints / "incomplete").exists()
    return adapter(run)


# Of the signal, torchrun's log tells only if the other rank ends in time.
@pytest.mark.parametrize(
    ("engine", "rank", "fault", "code", "words"),
    [
        ("ddp", 1, KILL, 9, "rank 1 died without reporting an error"),
        ("ddp", 0, KILL, 9, "rank 0 died without reporting an error"),
        ("ddp", 1, RAISE, 1, "ValueError: an injected fault"),
        ("deepspeed_z2", 1, KILL, 9, "rank 1 died without reporting an error"),
        ("fsdp2", 1, KILL, 9, "rank 1 died without reporting an error"),
        ("fsdp2", 0, RAISE, 1, "ValueError: an injected fault"),
        ("deepspeed_z3", 1, KILL, 9, "rank 1 died without reporting an error"),
    ],
    ids=[
        "ddp-kill-1",
        "ddp-kill-0",
        "ddp-raise-1",
        "deepspeed_z2-kill-1",
        "fsdp2-kill-1",
        "fsdp2-raise-0",
        "z3-kill-1",
    ],
)
def test_a_rank_that_fails_in_the_middle_of_a_save_costs_that_checkpoint_alone(
    tiny_model, tmp_path, monkeypatch, undisturbed, engine, rank, fault, code, words
):
    expected = undisturbed(engine)
    folder = tmp_path / FOLDER
    config, run = make_workspace(folder, tiny_model), RunDir(folder / "runs" / "one")
    script = FAULTY_RANK.format(repository=str(REPOSITORY), rank=rank, call=SECOND_SAVE[rank], fault=fault)
    with launching(script, folder, monkeypatch):
        done = sft("train", "--config", config, f"parallel.engine={engine}", *WORDS)
    assert done.code == code and words in done.err, done.err
    assert (run.checkpoints / "incomplete" / "checkpoint-4").is_dir()
    assert goes_on(config, run, engine, 2) == expected


@contextmanager
def launching(script: str, folder: Path, monkeypatch) -> Iterator[None]:
    """In the block, ranks run this script."""
    file = folder / "faulty_rank.py"
    file.write_text(script)
    with monkeypatch.context() as patch:
        patch.setattr(accelerate, "SCRIPT", file)
        patch.chdir(folder)
        yield


@pytest.fixture
def control_group():
    """A control group whose processes may use 64 MiB together; skips the test where none may be made."""
    for parent, limit in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
        group = Path("/sys/fs/cgroup", parent, f"sft-play-{os.getpid()}")
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / limit).exists():
            (group / limit).write_text(str(64 << 20))
            yield group
            group.rmdir()
            return
        group.rmdir()
    pytest.skip("control groups with a limit on memory need root")


LIMITED_RANK = """\
import os, sys
sys.path.insert(0, {repository!r})
from sft_play.machine.process import die_with_parent
die_with_parent()
from sft_play.cli import run_rank
from sft_play.train.callbacks import Reporter

begins = Reporter.on_step_begin

def need_more(self, args, state, control, **given):
    if state.global_step == 4:
        open({processes!r}, "w").write(str(os.getpid()))
        b"x" * (256 << 20)
    return begins(self, args, state, control, **given)

if os.environ["RANK"] == "1":
    Reporter.on_step_begin = need_more
raise SystemExit(run_rank(sys.argv[1:]))
"""


def test_a_rank_that_the_kernel_kills_at_a_limit_on_memory_leaves_its_checkpoints(
    tiny_model, tmp_path, monkeypatch, undisturbed, control_group
):
    expected = undisturbed("ddp")
    folder = tmp_path / FOLDER
    config, run = make_workspace(folder, tiny_model), RunDir(folder / "runs" / "one")
    script = LIMITED_RANK.format(repository=str(REPOSITORY), processes=str(control_group / "cgroup.procs"))
    with launching(script, folder, monkeypatch):
        done = sft("train", "--config", config, "parallel.engine=ddp", *WORDS)
    said = " ".join(done.err.split())
    assert done.code == 9 and "rank 1 died without reporting an error" in said, said
    assert (
        "meanwhile the kernel killed a process because the machine, or its container, had no memory" in said
    )
    assert goes_on(config, run, "ddp", 4) == expected
