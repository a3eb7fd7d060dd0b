"""accelerate's config files: those we ship, and its own in the home folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

from sft_play import resources
from sft_play.engines.registry import ALONE, distributed_engines, engine_of
from sft_play.errors import ConfigError, StorageError
from sft_play.files import write_atomic
from sft_play.machine.gpus import Machine, detect
from sft_play.report.layout import ending
from sft_play.spelling import either, make
from sft_play.ui.console import console

CONFIGS = resources.CONFIGS / "accelerate"
CPU_PROCESSES = 2  # started by the distributed targets on a machine without a GPU


def config_file(engine: str, device: str, nodes: int = 1) -> Path:
    """The shipped accelerate config for an engine, given by its name, on "cuda" or "cpu"."""
    row = engine_of(engine)
    if not row.distributes:
        return CONFIGS / f"{row.accelerate}.yaml"
    here = "_cpu" if device == "cpu" else ""
    return CONFIGS / f"{row.accelerate}{'_multi_node' if nodes > 1 else here}.yaml"


def default_config_path() -> Path:
    """Where `accelerate config` writes and `accelerate launch` without --config_file reads."""
    cache = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(cache).expanduser() / "accelerate" / "default_config.yaml"


def setup_accelerate(auto: bool, machine: Machine | None = None) -> int:
    """Writes accelerate's default config, by its wizard or for this machine.

    Raises:
        ConfigError: there is no terminal for the wizard.
        StorageError: the file cannot be written.
    """
    if not auto:
        if not (sys.stdin and sys.stdin.isatty()):
            auto_command = make("setup-accelerate", AUTO=1)
            raise ConfigError(f"the wizard asks questions in a terminal; `{auto_command}` needs none")
        return subprocess.call([sys.executable, "-m", "accelerate.commands.accelerate_cli", "config"])
    path = default_config_path()
    text = default_config(machine or detect())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.read_text(encoding="utf-8") != text:
            backup = path.with_suffix(".yaml.before")
            path.replace(backup)
            console().print(f"moved the earlier file to {backup}")
        write_atomic(path, text)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from None
    settings = re.sub("^#.*\n", "", text, flags=re.MULTILINE).strip()
    said = f"wrote {path}, which `accelerate launch` reads without --config_file:\n\n{settings}\n"
    console().print(said)
    script = either("scripts/train_distributed.py", "--module sft_play.scripts.train_distributed")
    launch = f"{either('.venv/bin/', '')}accelerate launch {script} --config configs/demo.yaml"
    console().print(ending({}, [launch]))
    return 0


def default_config(machine: Machine) -> str:
    """The shipped config for this machine, with its number of processes filled in."""
    count = len(machine.gpus)
    engine = ALONE if count == 1 else distributed_engines()[0]
    text = config_file(engine.name, "cuda" if count else "cpu").read_text(encoding="utf-8")
    return re.sub("^num_processes:.*", f"num_processes: {count or CPU_PROCESSES}", text, flags=re.MULTILINE)
