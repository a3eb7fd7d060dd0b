"""What is trained beside adapters, for the plan."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sft_play.model.architecture import empty_model
from sft_play.model.targets import modules_to_save
from sft_play.reasons import NewTokens, TrainedWhole

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def trained_besides(
    config: "PretrainedConfig", tokens: int, names: Sequence[str]
) -> tuple[NewTokens | None, TrainedWhole | None]:
    """The rows of new tokens, and the modules that are trained whole.

    Args:
        config: the architecture.
        tokens: number of new tokens.
        names: tuning.lora.modules_to_save, if there is an adapter.

    Raises:
        ConfigError: this model has no such module.
    """
    model: Any = empty_model(config)
    rows = whole = None
    if tokens:
        outer = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
        parameters = sum({id(weight): tokens * weight.shape[1] for weight in outer}.values())
        rows = NewTokens(tokens, parameters, tied=outer[0] is outer[1])
    if names:
        modules = modules_to_save(model, names)
        weights = {id(p): p.numel() for name in modules for p in model.get_submodule(name).parameters()}
        whole = TrainedWhole(sum(weights.values()), len(modules), tuple(names))
    return rows, whole
