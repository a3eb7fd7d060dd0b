"""Whether the base model in a folder is still the one that a run began with, by hashes of its files.

A folder has no published hashes, unless `hf download --local-dir` made it, so damage from before the first
use is not noticed. Files are hashed once, and again when their size, time or place has changed.
"""

from pathlib import Path

from sft_play.cache import entry, read_value, write_value
from sft_play.config.schema import ModelConfig
from sft_play.errors import ConfigError
from sft_play.manifest import Entries, hash_files
from sft_play.model.files import weight_files
from sft_play.model.hub_files import SAID_FROM_BYTES
from sft_play.runlog import RunDir, console, read_json
from sft_play.units import format_bytes


def base_files(model: ModelConfig) -> Entries:
    """Sizes and hashes of the weights and of config.json in a model's folder; {} for a model of the Hub."""
    folder = Path(model.name)
    if not folder.is_dir():
        return {}
    names = [name for name in (*weight_files(folder), "config.json") if (folder / name).is_file()]
    kept = {name: _kept(folder / name) for name in names}
    found: Entries = {name: known for name, path in kept.items() if (known := read_value(path))}
    left = [name for name in names if name not in found]
    size = sum((folder / name).stat().st_size for name in left)
    if size >= SAID_FROM_BYTES:
        console().print(f"  hashing {format_bytes(size)} of {folder}, once")
    hashed = hash_files(folder, left)
    for name, value in hashed.items():
        write_value(kept[name], value)
    return found | hashed


def _kept(file: Path) -> Path:
    """Where the hash of a file is kept; another place once somebody has written to the file."""
    status = file.stat()
    return entry("base-files", str(file.resolve()), status.st_size, status.st_mtime_ns, status.st_ino)


def keep_base_files(model: ModelConfig, run: RunDir) -> None:
    """Writes into the run directory what the base model is that the run begins with."""
    run.write_json(run.base, {"files": base_files(model)})


def require_same_base(model: ModelConfig, run: RunDir) -> None:
    """Compares the base model in a folder with the one that the run began with, if that is known.

    Raises:
        ConfigError: a file differs; names it.
    """
    began = read_json(run.base).get("files")
    if not began or not Path(model.name).is_dir():
        return
    now = base_files(model)
    changed = [name for name in began if now.get(name) != began[name]]
    if not changed:
        return
    what = "is not the one" if changed[0] in now else "is missing; it was there"
    raise ConfigError(
        f"model.name: {changed[0]} in {model.name} {what} that {run.path.name} was trained with: damaged, or "
        f"replaced by another. Copy it again; if the change is meant, remove {run.base}"
    )
