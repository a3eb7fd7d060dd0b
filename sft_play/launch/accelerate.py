"""`accelerate launch` for a plan: the command line, the environment, and the watch over what it starts."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sft_play.errors import ConfigError, LaunchError
from sft_play.host import detect_host
from sft_play.launch.beats import forget as forget_beats
from sft_play.launch.default_config import stale_default_config
from sft_play.launch.extensions import clear_abandoned_locks, extensions_folder
from sft_play.launch.guard import LAUNCHER_VARIABLE
from sft_play.launch.link import Link
from sft_play.launch.nodes import ALONE, Nodes, interface_towards
from sft_play.launch.ranks import (
    PROCESSES_VARIABLE,
    RANKS_VARIABLE,
    SAVED,
    RankExit,
    clear_rank_exits,
    lost_peer,
    outcome,
    raise_unless_done,
    read_rank_exits,
    reports_folder,
)
from sft_play.launch.ranks import report_rank_exit as report_rank_exit
from sft_play.launch.watch import LAUNCHER_MODULE, Watch
from sft_play.runlog import RunDir, console
from sft_play.sizing.planner import Plan

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = REPOSITORY / "configs" / "accelerate"
DEEPSPEED_CONFIG = REPOSITORY / "configs" / "deepspeed_z2.json"

CPU_PROCESSES = 2  # what the distributed targets start on a machine without a GPU
RANK_FAILED = "Root Cause (first observed failure)"  # torchrun's words: a rank ran, also if it ended before we saw it
SAVE_GRACE_S = 600  # a signal to torchrun itself: so long may its ranks save before it kills them (its default is 30)
CAUSE_WAIT_S = 8.0  # ranks that only lost a peer: so long may the machine with the cause take to tell it


@dataclass(frozen=True)
class Launch:
    """A command and what it finds in its environment besides ours."""

    argv: tuple[str, ...]
    script: str
    environment: dict[str, str] = field(default_factory=dict)


def config_file(engine: str, device: str, nodes: int = 1) -> Path:
    """The shipped accelerate config for an engine ("none", "ddp" or "deepspeed_z2") on a device ("cuda" or "cpu")."""
    if engine == "none":
        return CONFIGS / "single_gpu.yaml"
    name = {"ddp": "ddp", "deepspeed_z2": "zero2"}[engine]
    return CONFIGS / f"{name}{'_multi_node' if nodes > 1 else '_cpu' if device == 'cpu' else ''}.yaml"


def launch_command(
    script: Sequence[str],
    *,
    engine: str,
    device: str,
    processes: int,
    cores: int | None = None,
    nodes: Nodes = ALONE,
    config: Path | None = None,
) -> Launch:
    """The command line of `accelerate launch`; pure.

    Args:
        script: the training script and its arguments.
        engine: "none", "ddp" or "deepspeed_z2".
        device: "cuda" or "cpu".
        processes: how many, over all machines.
        cores: CPU cores of this machine, shared out among its processes; None leaves OMP_NUM_THREADS as it is.
        nodes: this machine's place among several.
        config: an accelerate config of the user's own.

    Raises:
        ConfigError: the processes cannot be shared out.
    """
    if processes < 1 or processes % nodes.count:
        raise ConfigError(f"{processes} processes do not divide among {nodes.count} machine(s)")
    file = config or config_file(engine, device, nodes.count)
    flags: dict[str, Any] = {"config_file": file, "num_processes": processes, "num_machines": nodes.count}
    if cores is not None:
        flags["num_cpu_threads_per_process"] = max(1, cores // (processes // nodes.count))
    if nodes.count > 1:
        flags |= {
            "machine_rank": nodes.rank,
            "main_process_ip": nodes.main_address,
            "main_process_port": nodes.main_port,
        }
    elif processes > 1:
        # accelerate does not read rdzv_backend from its config file, only from here
        flags |= {"main_process_port": 0, "rdzv_backend": "loopback"}
    if engine == "deepspeed_z2":
        flags["deepspeed_config_file"] = DEEPSPEED_CONFIG
    options = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    argv = (sys.executable, "-m", LAUNCHER_MODULE, *options, *script)
    interface = loopback_interface() if nodes.count == 1 else interface_towards(nodes.main_address)
    return Launch(argv, script[0], launch_environment(device, processes, interface))


def launch_environment(device: str, processes: int, interface: str | None) -> dict[str, str]:
    """What the launcher and the ranks need in their environment; gloo and NCCL listen on `interface` alone, if it is known."""
    values = {
        PROCESSES_VARIABLE: str(processes),
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # so that the numbers are those of nvidia-smi
        # torchrun would die of SIGUSR1 and orphan its workers; it must pass the signal on, and let them save
        "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SAVE_GRACE_S),
    }
    if device == "cpu":
        # not ACCELERATE_USE_CPU: it would switch DeepSpeed off; the trainer says use_cpu itself
        values |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    if interface:
        values |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return values


def loopback_interface() -> str | None:
    """The interface that gloo and NCCL then listen on alone; None where it is not known."""
    return "lo" if Path("/sys/class/net/lo").exists() else None


def launch(
    plan: Plan,
    *,
    script: Sequence[str],
    run: RunDir,
    environment: Mapping[str, str] | None = None,
    nodes: Nodes = ALONE,
    link: Link | None = None,
    config: Path | None = None,
) -> None:
    """Runs `script` in as many processes as the plan has, or on this machine's share of them, and waits for them.

    Raises:
        SftPlayError: a rank failed; the class has that rank's exit code and the message is its own.
    """
    if config is None and (warning := stale_default_config(plan.world_size, plan.engine)):
        console().print(f"[yellow]{warning}[/]")
    if plan.engine == "deepspeed_z2":
        clear_abandoned_locks(extensions_folder())
    command = launch_command(
        [str(_find_script(script[0])), *script[1:]],
        engine=plan.engine,
        device=plan.device,
        processes=plan.world_size,
        cores=None if "OMP_NUM_THREADS" in os.environ else detect_host().cpu_cores,
        nodes=nodes,
        config=config,
    )
    result = run_launcher(command, run, processes=plan.world_size, nodes=nodes, link=link, environment=environment)
    raise_unless_done(result)


def _find_script(name: str) -> Path:
    path = Path(name) if Path(name).is_file() else REPOSITORY / name
    if not path.is_file():
        raise LaunchError(f"{name} is not there; run sft-play from a clone of its repository")
    return path.absolute()


def run_launcher(
    command: Launch,
    run: RunDir,
    *,
    processes: int,
    nodes: Nodes = ALONE,
    link: Link | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> RankExit:
    """Starts the launcher, passes signals on to its ranks, ends all when one fails, and says what it came to.

    The ranks print on our console; what accelerate and torchrun print goes to launcher.log in the run directory.
    """
    local = processes // nodes.count
    ranks = range(nodes.rank * local, (nodes.rank + 1) * local)
    clear_rank_exits(run, ranks)
    forget_beats(run, ranks)
    values = {**os.environ, **_unset(command.environment), **(environment or {})}
    values |= {RANKS_VARIABLE: str(reports_folder(run).absolute()), LAUNCHER_VARIABLE: str(os.getpid())}
    log_path = run.path / ("launcher.log" if nodes.rank == 0 else f"launcher.node{nodes.rank}.log")
    with log_path.open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "sft_play.launch.guard", *command.argv],
            env=values,
            stdin=subprocess.DEVNULL,
            stdout=_console_stream(),
            stderr=None if os.environ.get("SFT_PLAY_VERBOSE") == "1" else log,
            start_new_session=True,  # Ctrl-C reaches us alone; we pass it on, once
        )
        watch = Watch(process, command.script, ranks, run, link)
        with watch.signals_passed_on():
            status = watch.until_end(timeout_s)
    exits = [report for report in read_rank_exits(run) if report.rank in ranks]
    started, tail = watch.started or RANK_FAILED in _tail(log_path), _tail(log_path)
    result = outcome(exits, ranks, status, started=started, stopped_by=watch.stopped_by, log_tail=tail, hung=watch.hung)
    own = watch.told or bool(watch.hung) or watch.stopped_by is not None or not started
    return _with_cause(result, link, own=own) if link else result


def _with_cause(result: RankExit, link: Link, *, own: bool) -> RankExit:
    """The outcome on this machine, or what ended the run on another one."""
    if own or result.code in (0, SAVED):
        return result
    if lost_peer(result) and result.code == 1:
        text = f"rank {result.rank} lost its connection to another machine, which has not said why"
        result = RankExit(result.rank, LaunchError.exit_code, text)
    return link.failure(CAUSE_WAIT_S) or result


def _unset(values: Mapping[str, str]) -> dict[str, str]:
    """`values` without what the user's own environment decides; what makes the world whole is ours."""
    ours = {PROCESSES_VARIABLE, "CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR"}
    return {name: value for name, value in values.items() if name in ours or name not in os.environ}


def _console_stream() -> Any:
    try:
        console().file.fileno()
    except (OSError, ValueError):  # a console without a file below it, as in tests
        return None
    return console().file


def _tail(path: Path, lines: int = 12) -> str:
    try:
        return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
