"""The models that a run is judged by: its base, what was trained, and the adapter merged into the base."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from sft_play.commands.merge import require_merged
from sft_play.config.schema import RunConfig
from sft_play.errors import CheckpointError
from sft_play.model.build import load_for_inference
from sft_play.model.weights.finished import release_memory
from sft_play.runlog import RunDir
from sft_play.ui.progress import LOADING, spinner

Result = TypeVar("Result")

BASE, MERGED = "base", "merged"


def trained_name(config: RunConfig) -> str:
    """What the trained weights are called: "adapter", or "result" after full fine-tuning."""
    return "result" if config.tuning.mode == "full" else "adapter"


def merged_model(config: RunConfig, run: RunDir, adapter: Path) -> tuple[Path | None, str | None]:
    """The folder of the merged model, or None and a sentence that says why it is left out.

    There is neither after full fine-tuning.
    """
    if config.tuning.mode == "full":
        return None, None
    try:
        with spinner("checking the merged model"):
            require_merged(run, adapter)
    except CheckpointError as error:
        return None, "; ".join(str(error).splitlines())
    return run.merged, None


def of_each_model(
    config: RunConfig, weights: Path, work: Callable[[str, Any], Result], merged: Path | None = None
) -> dict[str, Result]:
    """What `work` returns for "base", for "adapter" or "result", and for "merged" if there is that folder.

    It is called with the name of a model and the model in eval mode, which it must not keep: never two are in
    memory. With an adapter, the base is the same model without it.
    """
    trained = trained_name(config)
    is_full = config.tuning.mode == "full"
    folders: dict[str, Path | None] = {BASE: None} if is_full else {}
    folders[trained] = weights
    if merged:
        folders[MERGED] = merged
    found: dict[str, Result] = {}
    for name, folder in folders.items():
        with spinner(LOADING):
            model: Any = load_for_inference(config, folder)
        if name == trained and not is_full:
            with model.disable_adapter():
                found[BASE] = work(BASE, model)
        found[name] = work(name, model)
        del model
        release_memory()
    return found
