"""accelerate's own config file in the home folder: written by its wizard, easily out of date."""

import os
from pathlib import Path


def default_config_path() -> Path:
    """Where `accelerate config` writes and `accelerate launch` without --config_file reads."""
    cache = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(cache).expanduser() / "accelerate" / "default_config.yaml"


def stale_default_config(processes: int, engine: str = "ddp") -> str | None:
    """What to tell about a default config that would start something else than this run; None if all is well.

    Our own targets never read that file: they name a shipped one and the number of processes.
    """
    import yaml

    path = default_config_path()
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None
    except yaml.YAMLError:
        return f"{path} is not valid YAML; remove it or write it anew: make setup-accelerate"
    found = tree if isinstance(tree, dict) else {}
    kind = "DEEPSPEED" if engine == "deepspeed_z2" else "MULTI_GPU" if processes > 1 else "NO"
    differs = [
        f"{key} {found.get(key)} instead of {wanted}"
        for key, wanted in (("num_processes", processes), ("distributed_type", kind))
        if str(found.get(key)) != str(wanted)
    ]
    if not differs:
        return None
    return f"{path} says {', '.join(differs)}; make targets do not read it, a bare `accelerate launch` would"
