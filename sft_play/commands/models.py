"""The models that a run is judged by: its base, what was trained, and the adapter merged into the base."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sft_play.commands.merge import require_merged
from sft_play.config.schema import RunConfig
from sft_play.errors import CheckpointError
from sft_play.model.build import load_for_inference
from sft_play.model.weights import release_memory
from sft_play.report.progress import LOADING, spinner
from sft_play.runlog import RunDir

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
            require_merged(run.merged, adapter)
    except CheckpointError as error:
        return None, "; ".join(str(error).splitlines())
    return run.merged, None


def of_each_model(
    config: RunConfig, weights: Path, work: Callable[[str, Any], Result], merged: Path | None = None
) -> dict[str, Result]:
    """Calls `work` with the base, with what was trained and with the merged model, one after the other.

    Never two models are in memory: with an adapter, the base is the same model without it.

    Args:
        config: of the run.
        weights: its adapter folder, or its model folder after full fine-tuning.
        work: called with the name of a model and the model in eval mode, which it must not keep.
        merged: folder of the merged model, if there is one.

    Returns:
        "base", then "adapter" or "result", then "merged" -> what `work` returned.
    """
    trained = trained_name(config)

    def without_and_with_adapter(model: Any) -> dict[str, Result]:
        with model.disable_adapter():
            base = work(BASE, model)
        return {BASE: base, trained: work(trained, model)}

    if config.tuning.mode == "full":
        found = {BASE: _with_model(config, None, partial(work, BASE))}
        found[trained] = _with_model(config, weights, partial(work, trained))
    else:
        found = _with_model(config, weights, without_and_with_adapter)
    if merged:
        found[MERGED] = _with_model(config, merged, partial(work, MERGED))
    return found


def _with_model(config: RunConfig, weights: Path | None, work: Callable[[Any], Result]) -> Result:
    """Loads a model for `work`, and frees its memory afterwards."""
    with spinner(LOADING):
        model = load_for_inference(config, weights)
    result = work(model)
    del model
    release_memory()
    return result
