"""accelerate's own config file in the home folder: written by `accelerate config`, easily out of date."""

import os
from pathlib import Path

from sft_play.engines.base import Engine

REMEDY = "remove it, or run `make setup-accelerate` to write it again"


def default_config_path() -> Path:
    """Where `accelerate config` writes and `accelerate launch` without --config_file reads."""
    cache = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(cache).expanduser() / "accelerate" / "default_config.yaml"


def stale_default_config(processes: int, engine: Engine) -> str | None:
    """A warning if accelerate's default config would not start this run as planned; None if it would.

    Our make targets never read that file: they pass a shipped config and the number of processes.
    """
    import yaml

    path = default_config_path()
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}; {REMEDY}"
    except (yaml.YAMLError, ValueError):  # ValueError: not UTF-8, or a date that does not exist
        return f"{path} is not valid YAML; {REMEDY}"
    found = tree if isinstance(tree, dict) else {}
    wanted = {"num_processes": str(processes), "distributed_type": engine.distributed_type}
    differs = [
        f"{key} {found.get(key)} instead of {value}"
        for key, value in wanted.items()
        if str(found.get(key)) != value
    ]
    if not differs:
        return None
    return f"{path} has {', '.join(differs)}; a plain `accelerate launch` would use it (make targets do not)"
