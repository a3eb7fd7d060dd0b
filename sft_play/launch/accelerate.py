"""`accelerate launch` for a plan: the command line, the environment, and running it under supervision."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from sft_play.engines.registry import engine_of
from sft_play.errors import ConfigError, LaunchError
from sft_play.launch.accelerate_config import config_file
from sft_play.launch.link import Link
from sft_play.launch.nodes import ALONE, Nodes, interface_of
from sft_play.launch.ranks import (
    PLAN_VARIABLE,
    PROCESSES_VARIABLE,
    REPORTS_VARIABLE,
    SAVED,
    RankExit,
    clear_reports,
    outcome,
    raise_unless_done,
    read_rank_exits,
    reports_folder,
    says_lost_peer,
    write_problem,
)
from sft_play.launch.rendezvous import SHUTDOWN_VARIABLE
from sft_play.launch.watch import LAUNCHER_MODULE, Watch
from sft_play.machine.host import detect_host, oom_kills
from sft_play.machine.process import LAUNCHER_VARIABLE
from sft_play.plan import Plan
from sft_play.resources import SCRIPTS
from sft_play.runlog import RunDir
from sft_play.secrets import redact_file
from sft_play.spelling import var
from sft_play.start import BEGAN_VARIABLE, began
from sft_play.ui.console import console
from sft_play.units import counted

SCRIPT = SCRIPTS / "train_distributed.py"  # of each rank
# torchrun's message when a rank failed; the rank may have ended before our first look at the processes.
RANK_FAILED = "Root Cause (first observed failure)"
# How long ranks may save after a signal to torchrun, before torchrun kills them (its default is 30).
SAVE_GRACE_S = 600
# If ranks only lost a peer: how long to wait for the machine with the root cause to report it.
CAUSE_WAIT_S = 8.0
TAIL_LINES = 12  # of the launcher's log, in messages


@dataclass(frozen=True)
class Launch:
    """A command, the environment variables that it adds to ours, and the ranks of this machine."""

    argv: tuple[str, ...]
    script: str
    environment: dict[str, str]
    ranks: range


def launch_command(
    script: Sequence[str],
    *,
    engine: str,
    device: str,
    processes: int,
    cores: int | None = None,
    nodes: Nodes = ALONE,
) -> Launch:
    """The command line of `accelerate launch` for a script with its arguments; pure.

    `device` is "cuda" or "cpu", `processes` those of all machines. This machine's `cores` are divided among
    its processes; None leaves OMP_NUM_THREADS as it is.

    Raises:
        ConfigError: the processes cannot be divided among the machines.
    """
    if processes < 1 or processes % nodes.count:
        raise ConfigError(
            f"{counted(processes, 'process')} cannot be divided among {counted(nodes.count, 'machine')}; set "
            f"{var(NGPU=None)} to the number of processes on each machine"
        )
    local = processes // nodes.count
    file = config_file(engine, device, nodes.count)
    flags: dict[str, Any] = {"config_file": file, "num_processes": processes, "num_machines": nodes.count}
    if cores is not None:
        flags["num_cpu_threads_per_process"] = max(1, cores // local)
    if nodes.count > 1:
        flags |= {
            "machine_rank": nodes.rank,
            "main_process_ip": nodes.main_address,
            "main_process_port": nodes.main_port,
        }
    elif processes > 1:
        # accelerate reads rdzv_backend from the command line only, not from its config file.
        flags |= {"main_process_port": 0, "rdzv_backend": "loopback"}
    flags |= engine_of(engine).launch_flags()
    options: list[str] = []
    for name, value in flags.items():
        options += [f"--{name}", str(value)]
    argv = (sys.executable, "-m", LAUNCHER_MODULE, *options, *script)
    ranks = range(nodes.rank * local, (nodes.rank + 1) * local)
    return Launch(argv, script[0], launch_environment(device, processes, interface_of(nodes)), ranks)


def launch_environment(device: str, processes: int, interface: str | None) -> dict[str, str]:
    """The environment of the launcher and the ranks; gloo and NCCL use only `interface`, if it is known."""
    values = {
        PROCESSES_VARIABLE: str(processes),
        BEGAN_VARIABLE: str(began()),
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # so that GPU indices are those of nvidia-smi
        # By default, SIGUSR1 kills torchrun and orphans its ranks; forwarded to them, it makes them save.
        "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        SHUTDOWN_VARIABLE: str(SAVE_GRACE_S),
    }
    if device == "cpu":
        # Not ACCELERATE_USE_CPU, which disables DeepSpeed; the trainer sets use_cpu itself.
        values |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    if interface:
        values |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return values


def launch(
    plan: Plan,
    arguments: Sequence[str],
    *,
    run: RunDir,
    nodes: Nodes = ALONE,
    link: Link | None = None,
) -> None:
    """Trains in this machine's share of the plan's processes, which read it, and waits until they end.

    `link` connects to the launchers on the other machines.

    Raises:
        SftPlayError: a rank failed; the class has that rank's exit code, the message is that of the rank.
    """
    engine_of(plan.sharing.engine).prepare_launch()
    command = launch_command(
        [str(SCRIPT), *arguments],
        engine=plan.sharing.engine,
        device=plan.device,
        processes=plan.sharing.world_size,
        cores=None if "OMP_NUM_THREADS" in os.environ else detect_host().cpu_cores,
        nodes=nodes,
    )
    handed_over = run.next_plan.with_suffix(f".node{nodes.rank}.json" if nodes.rank else ".json")
    run.write_json(handed_over, plan.to_json())
    environment = {PLAN_VARIABLE: str(handed_over.absolute())}
    here = counted(len(command.ranks), "process")
    console().print(f"  starting {here}: PyTorch and transformers are loaded first", style="dim")
    raise_unless_done(run_launcher(command, run, link=link, environment=environment))


def run_launcher(
    command: Launch,
    run: RunDir,
    *,
    link: Link | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> RankExit:
    """Runs the launcher, forwards signals to its ranks, ends all when one fails, and returns the outcome.

    The ranks print to our console; the output of accelerate and torchrun goes to launcher.log in the run
    directory. After `timeout_s` seconds everything is killed.
    """
    ranks = command.ranks
    clear_reports(run, ranks)
    kills = oom_kills()
    node = ranks.start // len(ranks)
    log_path = run.path / (f"launcher.node{node}.log" if node else "launcher.log")
    with log_path.open("w", encoding="utf-8") as log:
        process = _started(command, run, environment or {}, log)
        watch = Watch(process, command.script, ranks, run, link)
        with watch.forwarded_signals():
            status = watch.until_end(timeout_s)
    redact_file(log_path)
    tail = "\n".join(log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:])
    started = watch.started or RANK_FAILED in tail
    result = outcome(
        read_rank_exits(run, ranks),
        ranks,
        status,
        started=started,
        stopped_by=watch.stopped_by,
        log_tail=tail,
        hung=watch.hung,
        paused_s=watch.paused_s,
        kernel_killed=oom_kills() > kills,
        unwritable=write_problem(run, len(ranks)) if status else None,
    )
    is_cause_here = watch.cause_reported or bool(watch.hung) or watch.stopped_by is not None or not started
    if link is None or is_cause_here:
        return result
    return _outcome_of_all_machines(result, link)


def _started(command: Launch, run: RunDir, environment: Mapping[str, str], log: TextIO) -> subprocess.Popen:
    values = {**os.environ, **_unset(command.environment), **environment}
    values |= {REPORTS_VARIABLE: str(reports_folder(run).absolute()), LAUNCHER_VARIABLE: str(os.getpid())}
    return subprocess.Popen(
        [sys.executable, "-m", "sft_play.machine.process", *command.argv],
        env=values,
        stdin=subprocess.DEVNULL,
        stdout=_console_stream(),
        stderr=None if os.environ.get("SFT_PLAY_VERBOSE") == "1" else log,
        start_new_session=True,  # only we receive Ctrl-C, and forward it once
    )


def _outcome_of_all_machines(result: RankExit, link: Link) -> RankExit:
    """The failure that another machine reported, or this machine's own outcome if there is none."""
    if result.code in (0, SAVED):
        return result
    if says_lost_peer(result.message) and result.code == 1:
        text = f"rank {result.rank} lost its connection to another machine, which did not report an error"
        result = RankExit(result.rank, LaunchError.exit_code, text)
    return link.failure(CAUSE_WAIT_S) or result


def _unset(values: Mapping[str, str]) -> dict[str, str]:
    """`values` without those that the user has set, except for those that a correct run depends on."""
    ours = {PROCESSES_VARIABLE, "CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR"}
    return {name: value for name, value in values.items() if name in ours or name not in os.environ}


def _console_stream() -> Any:
    try:
        console().file.fileno()
    except (OSError, ValueError):  # a console that does not write to a file, as in tests
        return None
    return console().file
