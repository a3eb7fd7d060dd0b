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
from sft_play.launch.ports import LOOPBACK
from sft_play.launch.ranks import (
    PROCESSES_VARIABLE,
    RANKS_VARIABLE,
    RankExit,
    clear_rank_exits,
    outcome,
    raise_unless_done,
    read_rank_exits,
    reports_folder,
)
from sft_play.launch.ranks import report_rank_exit as report_rank_exit
from sft_play.launch.watch import Watch
from sft_play.runlog import RunDir, console
from sft_play.sizing.planner import Plan

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = REPOSITORY / "configs" / "accelerate"
DEEPSPEED_CONFIG = REPOSITORY / "configs" / "deepspeed_z2.json"

CPU_PROCESSES = 2  # what the distributed targets start on a machine without a GPU
RANK_FAILED = "Root Cause (first observed failure)"  # torchrun's words: a rank ran, also if it ended before we saw it
SAVE_GRACE_S = 600  # a signal to torchrun itself: so long may its ranks save before it kills them (its default is 30)


@dataclass(frozen=True)
class Nodes:
    """Where this machine stands among several; the default is a single one."""

    count: int = 1
    rank: int = 0
    main_address: str = LOOPBACK
    main_port: int = 0


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
    return CONFIGS / f"{name}{'_cpu' if device == 'cpu' else ''}{'_multi_node' if nodes > 1 else ''}.yaml"


def launch_command(
    script: Sequence[str],
    *,
    engine: str,
    device: str,
    processes: int,
    cores: int | None = None,
    nodes: Nodes = Nodes(),
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
    if device == "cpu" and nodes.count > 1 and config is None:
        raise ConfigError("several machines without GPUs: give an accelerate config of your own")
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
    argv = (sys.executable, "-m", "accelerate.commands.launch", *options, *script)
    return Launch(argv, script[0], launch_environment(device, processes, single_node=nodes.count == 1))


def launch_environment(device: str, processes: int, *, single_node: bool) -> dict[str, str]:
    """What the launcher and the ranks need in their environment."""
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
    interface = loopback_interface()
    if single_node and interface:
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
    nodes: Nodes = Nodes(),
    config: Path | None = None,
) -> None:
    """Runs `script` in as many processes as the plan has and waits for them.

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
    raise_unless_done(run_launcher(command, run, processes=plan.world_size, nodes=nodes, environment=environment))


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
    nodes: Nodes = Nodes(),
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
    log_path = run.path / "launcher.log"
    with log_path.open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "sft_play.launch.guard", *command.argv],
            env=values,
            stdin=subprocess.DEVNULL,
            stdout=_console_stream(),
            stderr=None if os.environ.get("SFT_PLAY_VERBOSE") == "1" else log,
            start_new_session=True,  # Ctrl-C reaches us alone; we pass it on, once
        )
        watch = Watch(process, command.script, ranks, run)
        with watch.signals_passed_on():
            status = watch.until_end(timeout_s)
    return outcome(
        read_rank_exits(run),
        ranks,
        status,
        started=watch.started or RANK_FAILED in _tail(log_path),
        stopped_by=watch.stopped_by,
        log_tail=_tail(log_path),
        hung=watch.hung,
    )


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
