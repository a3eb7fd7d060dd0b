"""The weights that a finished run left, checked before anything large is loaded."""

import gc
from pathlib import Path

from sft_play.config.schema import RunConfig
from sft_play.errors import CheckpointError
from sft_play.runlog import RunDir, console, read_json


def _require_whole(file: Path, next_command: str) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="pt") as opened:  # reads the header and compares it with the file's length
            empty = not opened.keys()
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} is damaged or half written: {error}\n{next_command}") from error
    if empty:
        raise CheckpointError(f"{file} holds no weights\n{next_command}")


def finished_weights(config: RunConfig, run: RunDir) -> Path:
    """The run's adapter folder, or its model folder after full fine-tuning; only safetensors, each file whole.

    Raises:
        CheckpointError: the run has not finished, or its files are damaged.
    """
    full = config.tuning.mode == "full"
    folder, settings = (run.model, "config.json") if full else (run.adapter, "adapter_config.json")
    next_command = f'finish the run with `make resume`, or train it with `make train ARGS="output.name={run.path.name}"`'
    if not run.path.is_dir():
        raise CheckpointError(
            f"there is no run {run.path}. Give the CONFIG (and output.name) that it was trained with, or {next_command}"
        )
    if not (folder / settings).is_file():
        raise CheckpointError(
            f"{run.path} has no finished {'model' if full else 'adapter'}: {folder / settings} is missing\n{next_command}"
        )
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:8])
        raise CheckpointError(f"{folder} has no *.safetensors weights (found: {found})\n{next_command}")
    listed = set(read_json(folder / "model.safetensors.index.json").get("weight_map", {}).values())
    missing = sorted(listed - {file.name for file in files})
    if missing:
        raise CheckpointError(f"{folder} lacks {', '.join(missing)}, which its index names\n{next_command}")
    for file in files:
        _require_whole(file, next_command)
    if not full:
        _compare_base(config, folder)
    return folder


def _compare_base(config: RunConfig, adapter: Path) -> None:
    base = read_json(adapter / "adapter_config.json").get("base_model_name_or_path")
    if base is not None and Path(base).name != Path(config.model.name).name:
        console().print(
            f"[yellow]warning[/yellow]: the adapter was trained on {base}, and this config names {config.model.name}",
            markup=True,
        )


def release_memory() -> None:
    """Gives back what dropped models held, on the device too; drop the last reference first."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
