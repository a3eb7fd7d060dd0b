"""Real launches on the CPU: listening sockets, forwarded signals, leftover processes and exit codes."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from sft_play.errors import ConfigError, DataError, Interrupted, LaunchError
from sft_play.launch import beats, tensorboard
from sft_play.launch.accelerate import launch_command, run_launcher
from sft_play.launch.accelerate_config import CONFIGS
from sft_play.launch.nodes import LOOPBACK
from sft_play.runlog import RunDir
from tests.integration.cli import gone

pytestmark = pytest.mark.integration

# A rank without torch: what it does is its first argument, for rank 1 the second; the third is the folder of
# its notes.
RANK = """
import json, os, signal, sys, time
from pathlib import Path
from sft_play.machine.process import die_with_parent
die_with_parent()
from sft_play.errors import SftPlayError
from sft_play.launch.beats import SETUP, Pulse
from sft_play.launch.ranks import RankEnvironment
from sft_play.launch.ranks import finish_rank
from sft_play.runlog import RunDir

ranks = RankEnvironment.read()
rank = ranks.rank
does, notes = sys.argv[1 + rank], Path(sys.argv[3])
try:
    ranks.require_whole_world()
except SftPlayError as error:
    sys.exit(finish_rank(ranks, error.exit_code, str(error)))
stopped = []
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, lambda number, frame: stopped.append(signal.Signals(number).name))
note = {"pid": os.getpid(), "parent": os.getppid(), "address": os.environ.get("MASTER_ADDR")}
(notes / f"rank{rank}").write_text(json.dumps(note))
while does in ("fail", "vanish") and len(list(notes.glob("rank[0-9]"))) < 2:
    time.sleep(0.05)  # otherwise the other rank may be ended before it has written its note
if does == "fail":
    sys.exit(finish_rank(ranks, 3, "rows.jsonl:7: content is null"))
if does == "hang":
    pulse = Pulse(RunDir(notes), rank, 1, exits=False)
    pulse.beat("step 4")
    time.sleep(600)
if does == "load":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    Pulse(RunDir(notes), rank, 1, exits=False).load()
    time.sleep(600)
if does == "wait for it":
    time.sleep(2)
    Pulse(RunDir(notes), rank, 1, exits=False).beat(SETUP)
    time.sleep(1)
    sys.exit(finish_rank(ranks, 9, "timed out after 1 s waiting for the other processes"))
if does == "vanish":
    os.kill(os.getpid(), signal.SIGKILL)
while not stopped and does != "end":
    time.sleep(0.05)
if stopped:
    time.sleep(0.5 * rank)  # the other one is still writing when the first has ended
    sys.exit(finish_rank(ranks, 75, stopped[0]))
sys.exit(finish_rank(ranks, 0))
"""


@pytest.fixture
def start(tmp_path):
    """Launches two ranks that do as told; `meanwhile` runs once both are up."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    run = RunDir(tmp_path)

    def launch(first: str, second: str, meanwhile=None, config=None):
        words = [str(script), first, second, str(tmp_path)]
        command = launch_command(words, engine="ddp", device="cpu", processes=2)
        if config:
            shipped = str(CONFIGS / "ddp_cpu.yaml")
            command = replace(command, argv=[str(config) if one == shipped else one for one in command.argv])
        if meanwhile:
            threading.Thread(target=lambda: meanwhile(ranks_up(tmp_path)), daemon=True).start()
        began = time.monotonic()
        result = run_launcher(command, run, timeout_s=60)
        return result, time.monotonic() - began

    return launch


def ranks_up(folder: Path, count: int = 2, timeout_s: float = 40) -> list[dict]:
    """The notes of all ranks, as soon as they are there."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        notes = [json.loads(path.read_text() or "null") for path in sorted(folder.glob("rank[0-9]"))]
        if len(notes) == count and all(notes):
            return notes
        time.sleep(0.05)
    raise AssertionError(f"{count} ranks were expected, found {notes}")


@pytest.mark.thorough
def test_the_rank_that_failed_gives_its_exit_code_and_its_words_and_ends_the_others(start, tmp_path):
    result, seconds = start("wait", "fail")
    assert (result.rank, result.code, result.message) == (
        1,
        DataError.exit_code,
        "rows.jsonl:7: content is null",
    )
    assert gone([note["pid"] for note in ranks_up(tmp_path)], 0) and seconds < 20


@pytest.mark.thorough
def test_a_rank_that_is_killed_is_named(start, tmp_path):
    result, _ = start("wait", "vanish")
    assert result.code == LaunchError.exit_code and "rank 1 died without reporting an error" in result.message
    assert gone([note["pid"] for note in ranks_up(tmp_path)], 0)


@pytest.mark.thorough
def test_ranks_that_all_hang_outside_of_an_exchange_are_named_and_ended(start, tmp_path, monkeypatch):
    """None of them times out, and under our launcher none ends itself."""
    monkeypatch.setattr(beats, "EXIT_MARGIN_S", 0.5)
    result, _ = start("hang", "hang")
    assert result.code == LaunchError.exit_code and "rank 1 hangs: no progress for" in result.message
    assert "rank 0 hangs" in result.message and "last seen in step 4" in result.message
    assert gone([note["pid"] for note in ranks_up(tmp_path)], 0)


@pytest.mark.thorough
def test_a_rank_that_hangs_while_it_loads_is_named_with_its_stack(start):
    """The launcher ends it as soon as the one that waited has failed."""
    result, _ = start("wait for it", "load")
    assert result.code == LaunchError.exit_code and "rank.py" in result.message
    assert (
        result.message.startswith("rank 1 hangs: no progress for")
        and "last seen in loading" in result.message
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),  # of SIGHUP, ranks get this one too
        signal.SIGUSR1,
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),  # the first of two is handled as SIGUSR1 is
        signal.SIGHUP,
    ],
)
def test_a_signal_to_us_reaches_the_ranks_and_all_may_save(start, number):
    result, _ = start("wait", "wait", lambda notes: os.kill(os.getpid(), number))
    received = signal.SIGTERM if number == signal.SIGHUP else number  # ranks may not handle a hangup
    assert (result.code, result.message) == (Interrupted.exit_code, received.name)


@pytest.mark.thorough
def test_a_second_ctrl_c_ends_everything_at_once(start, tmp_path):
    def twice(notes):
        for note in notes:  # they cannot act on the first one
            os.kill(note["pid"], signal.SIGSTOP)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)

    result, _ = start("wait", "wait", twice)
    assert (result.code, result.message) == (130, "stopped by SIGINT")
    assert gone([note["pid"] for note in ranks_up(tmp_path)], 2)


def test_no_rank_outlives_a_launcher_that_is_killed(start, tmp_path):
    result, _ = start("wait", "wait", lambda notes: os.kill(notes[0]["parent"], signal.SIGKILL))
    assert result.code == LaunchError.exit_code
    assert gone([note["pid"] for note in ranks_up(tmp_path)], 0)


@pytest.mark.thorough
def test_no_process_outlives_the_command_that_is_killed(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    script = f"""
from pathlib import Path
from sft_play.launch.accelerate import launch_command, run_launcher
from sft_play.runlog import RunDir
words = [{str(tmp_path / "rank.py")!r}, "wait", "wait", {str(tmp_path)!r}]
command = launch_command(words, engine="ddp", device="cpu", processes=2)
run_launcher(command, RunDir(Path({str(tmp_path)!r})))
"""
    command = subprocess.Popen([sys.executable, "-c", script])
    try:
        notes = ranks_up(tmp_path)
        family = [command.pid, notes[0]["parent"], *(note["pid"] for note in notes)]
        command.kill()
        command.wait()
        assert gone(family)
    finally:
        command.kill()


@pytest.mark.thorough
def test_a_launcher_that_starts_fewer_ranks_than_asked_is_found_out(start, tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text(
        (CONFIGS / "ddp_cpu.yaml").read_text().replace("MULTI_GPU", "MULTI_CPU").replace("# ", "#")
    )
    result, _ = start("end", "end", config=own)
    assert result.code == ConfigError.exit_code
    assert "2 processes were requested, but the launcher started 1" in result.message


LISTENERS = """
import json, os, psutil, sys
from pathlib import Path
import torch, torch.distributed as dist
from accelerate import PartialState

state = PartialState(cpu=True)
total = torch.ones(1)
dist.all_reduce(total)
pids = [os.getpid(), os.getppid()]
sockets = [c for pid in pids for c in psutil.Process(pid).net_connections("inet")]
found = [list(c.laddr) for c in sockets if c.status == psutil.CONN_LISTEN]
note = {"world": state.num_processes, "sum": total.item(), "listening": found}
note |= {"parent": os.getppid(), "address": os.environ["MASTER_ADDR"]}
Path(sys.argv[1], f"rank{state.process_index}").write_text(json.dumps(note))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.thorough
def test_the_process_group_of_one_machine_listens_on_loopback_only(tmp_path):
    (tmp_path / "listeners.py").write_text(LISTENERS)
    command = launch_command(
        [str(tmp_path / "listeners.py"), str(tmp_path)], engine="ddp", device="cpu", processes=2, cores=2
    )
    assert run_launcher(command, RunDir(tmp_path), timeout_s=200).code == 0
    assert len({note["parent"] for note in ranks_up(tmp_path)}) == 1
    for note in ranks_up(tmp_path):
        assert (note["world"], note["sum"], note["address"]) == (2, 2.0, LOOPBACK)
        assert len(note["listening"]) >= 2  # the store and gloo
        assert {address for address, _ in note["listening"]} == {LOOPBACK}


MEETS = """
import sys
from pathlib import Path
import torch.distributed as dist

dist.init_process_group("gloo")
met = [None] * dist.get_world_size()
dist.all_gather_object(met, sys.argv[1])
Path(sys.argv[1], f"met{dist.get_rank()}").write_text(" ".join(met))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_five_runs_started_at_once_do_not_meet_nor_mind_that_the_usual_port_is_taken(tmp_path):
    script = tmp_path / "meets.py"
    script.write_text(MEETS)
    folders = [tmp_path / str(number) for number in range(5)]

    def run(folder: Path) -> None:
        folder.mkdir()
        command = launch_command([str(script), str(folder)], engine="ddp", device="cpu", processes=2, cores=2)
        run_launcher(command, RunDir(folder), timeout_s=240)

    with contextlib.suppress(OSError), socket.create_server((LOOPBACK, 29500)):  # or somebody else has it
        threads = [threading.Thread(target=run, args=(folder,)) for folder in folders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for folder in folders:
        assert [(folder / f"met{rank}").read_text() for rank in range(2)] == [f"{folder} {folder}"] * 2


def test_accelerate_reads_every_shipped_config_as_it_is_meant():
    from accelerate.commands.config.config_args import load_config_from_file

    for path in CONFIGS.glob("*.yaml"):
        config = load_config_from_file(str(path))
        kind = "DEEPSPEED" if "zero" in path.stem else "MULTI_GPU" if "ddp" in path.stem else "NO"
        assert str(config.distributed_type).rpartition(".")[2] == kind, path
        assert config.use_cpu == ("cpu" in path.stem)


def wait_for(server):
    """Until it answers, for at most 60 s."""
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, server.port), timeout=1):
            return
        time.sleep(0.2)
    pytest.fail("TensorBoard does not answer")


@pytest.mark.thorough
def test_tensorboard_serves_loopback_and_ends_with_the_training(tmp_path, capsys):
    with tensorboard.while_training(tmp_path):
        server = tensorboard.running(tmp_path)
        assert tensorboard.start(tmp_path) == server  # the one that runs is found again
        wait_for(server)
        listening = [
            connection.laddr.ip
            for process in [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert set(listening) == {LOOPBACK}
    assert tensorboard.running(tmp_path) is None and gone([server.pid])
    assert "ssh -L" in capsys.readouterr().out


def test_a_pid_file_that_names_another_process_stops_nobody(tmp_path):
    me = psutil.Process()
    record = {"pid": me.pid, "started": me.create_time(), "port": 6006}
    tensorboard.pid_file(tmp_path).write_text(json.dumps(record))
    assert tensorboard.running(tmp_path) is None and tensorboard.stop(tmp_path) is False
    assert not tensorboard.pid_file(tmp_path).exists()
