"""Whether a base model in a folder is still the one that a run began with.

A file is known by its size and its first and last MiB: all of config.json, and of weights the header, which
names each tensor, and some of the last ones. Hashing all of them would take minutes before a first run.
`hf cache verify` compares whole files with the hashes that the Hub gives out.
"""

import hashlib
from pathlib import Path

from sft_play.config.schema import ModelConfig
from sft_play.errors import ConfigError
from sft_play.manifest import Entries
from sft_play.model.weights.files import weight_files
from sft_play.runlog import RunDir, read_json
from sft_play.units import MIB


def base_files(model: ModelConfig) -> Entries:
    """What the weights and config.json in a model's folder are known by; {} for a model of the Hub."""
    folder = Path(model.name)
    if not folder.is_dir():
        return {}
    names = [name for name in (*weight_files(folder), "config.json") if (folder / name).is_file()]
    return {name: _known_by(folder / name) for name in names}


def _known_by(path: Path) -> dict[str, int | str]:
    size = path.stat().st_size
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(MIB))
        file.seek(max(MIB, size - MIB))
        digest.update(file.read())
    return {"bytes": size, "ends": digest.hexdigest()}


def keep_base_files(model: ModelConfig, run: RunDir) -> None:
    """Writes into the run directory what the base model is that the run begins with."""
    run.write_json(run.base, {"files": base_files(model)})


def require_same_base(model: ModelConfig, run: RunDir) -> None:
    """Raises a ConfigError if a file of the base model is not the one that the run began with, if known."""
    began = read_json(run.base).get("files")
    if not began or not Path(model.name).is_dir():
        return
    now = base_files(model)
    # of runs begun with earlier versions, which hashed whole files, the sizes are compared
    changed = [
        name
        for name, known in began.items()
        if name not in now or any(now[name][key] != known[key] for key in now[name].keys() & known.keys())
    ]
    if not changed:
        return
    what = "is not the one" if changed[0] in now else "is missing; it was there"
    raise ConfigError(
        f"model.name: {changed[0]} in {model.name} {what} that {run.path.name} was trained with: damaged, or "
        f"replaced by another. Copy it again; if the change is meant, remove {run.base}"
    )
