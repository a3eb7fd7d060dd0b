"""Weights: those of a finished run, checked before they are loaded, and values that are not finite."""

import gc
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from sft_play.config.inputs import asked_name
from sft_play.config.schema import RunConfig
from sft_play.errors import CheckpointError
from sft_play.manifest import find_damage, has_manifest, read_manifest
from sft_play.model.weights.base_files import require_same_base
from sft_play.model.weights.files import foreign_weights, missing_shards
from sft_play.runlog import RunDir, read_json
from sft_play.spelling import make, var
from sft_play.ui.console import warn

if TYPE_CHECKING:
    from torch import Tensor


def require_undamaged(folder: Path, next_command: str) -> None:
    """Raises a CheckpointError, which ends with `next_command`, if weights are not as their manifest says.

    Earlier versions wrote none.
    """
    damage = find_damage(folder) if has_manifest(folder) else None
    if damage:
        raise CheckpointError(f"{folder} is damaged: {damage}\n{next_command}")


def _require_whole(file: Path, next_command: str) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        # Opening reads the header and compares it with the length of the file.
        with safe_open(str(file), framework="pt") as opened:
            empty = not opened.keys()
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} is damaged or incomplete: {error}\n{next_command}") from error
    if empty:
        raise CheckpointError(f"{file} contains no weights\n{next_command}")


def _require_same_positions(config: RunConfig, adapter: Path) -> None:
    """Raises a CheckpointError if an adapter was trained with other positions than the config gives it."""
    now, manifest = config.model.model_dump()["rope_scaling"], read_manifest(adapter)
    if "rope_scaling" in manifest and manifest["rope_scaling"] != now:
        raise CheckpointError(
            f"{adapter} was trained with model.rope_scaling={manifest['rope_scaling']}, and the config has "
            f"{now}; use the config that it was trained with ({var(RUN='<name>')} without {var(CONFIG=None)})"
        )


def finished_weights(config: RunConfig, run: RunDir) -> Path:
    """The run's adapter folder, or its model folder after full fine-tuning, with complete safetensors files.

    Raises:
        CheckpointError: the run has not finished, its files are damaged, or it has other new tokens.
        ConfigError: the base model in a folder is not the one that the adapter was trained on.
    """
    full = config.tuning.mode == "full"
    folder, settings = (run.model, "config.json") if full else (run.adapter, "adapter_config.json")
    next_command = f"finish the run with `{run.resume_command()}`, or train it again"
    if not run.path.is_dir():
        raise CheckpointError(
            f"there is no run {run.path}. Use the {var(CONFIG=None)} and {var(RUN=None)} that it was trained "
            f"with, or `{make('train')}` it"
        )
    if not (folder / settings).is_file():
        kind = "model" if full else "adapter"
        raise CheckpointError(
            f"{run.path} has no finished {kind}: {folder / settings} is missing\n{next_command}"
        )
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:8])
        raise CheckpointError(f"{folder} has no *.safetensors weights (found: {found})\n{next_command}")
    if foreign := foreign_weights(folder):
        raise CheckpointError(f"{folder} is damaged: {foreign}, no *.safetensors beside it\n{next_command}")
    if missing := missing_shards(folder):
        raise CheckpointError(f"{folder} lacks {', '.join(missing)}, listed in its index\n{next_command}")
    require_undamaged(folder, next_command)
    for file in files:
        _require_whole(file, next_command)
    trained, new = read_manifest(folder).get("new_tokens"), list(config.model.new_tokens)
    if trained is not None and trained != new:
        raise CheckpointError(
            f"{folder} was trained with model.new_tokens={trained}, and the config has {new}; use the config "
            "that it was trained with"
        )
    if not full:
        _require_same_positions(config, folder)
        base, asked = read_json(folder / settings).get("base_model_name_or_path"), config.model.name
        if base is not None and Path(base).name != Path(asked).name:
            names = f"trained on {asked_name(base)}, but the config's model.name is {asked_name(asked)}"
            warn(f"warning: the adapter was {names}; {run.config} has the settings that it was trained with")
        require_same_base(config.model, run)
    return folder


def release_memory() -> None:
    """Frees what nothing refers to any more, on a GPU also for other processes."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def first_not_finite(weights: Iterable[tuple[str, "Tensor"]]) -> str | None:
    """The name of the first of these named tensors that has a NaN or infinite value; None if all are finite.

    A sum is not finite if a value is not, and needs no copy of the tensor. The converse may fail, so what the
    sums point out is looked at value by value. Of a tensor that is divided among processes, this one's part
    is looked at.
    """
    import torch

    from sft_play.engines.stored import part_of

    parts = ((name, part_of(weight)) for name, weight in weights)
    floating = [(name, weight.detach()) for name, weight in parts if weight.is_floating_point()]
    sums = [weight.sum(dtype=torch.float32) for _, weight in floating]
    if not sums or torch.stack([each.to(sums[0].device) for each in sums]).isfinite().all():
        return None
    return next((name for name, weight in floating if not torch.isfinite(weight).all()), None)
