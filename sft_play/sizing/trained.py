"""What is trained beside adapters, for the plan."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sft_play.model.architecture import empty_model
from sft_play.model.targets import modules_to_save
from sft_play.units import counted

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def trained_besides(config: "PretrainedConfig", tokens: int, names: Sequence[str]) -> list[str]:
    """A sentence on the rows of new tokens, and one on modules that are trained whole.

    Args:
        config: the architecture.
        tokens: number of new tokens.
        names: tuning.lora.modules_to_save, if there is an adapter.

    Raises:
        ConfigError: this model has no such module.
    """
    if not tokens and not names:
        return []
    model: Any = empty_model(config)
    found = []
    if tokens:
        outer = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
        rows = sum({id(weight): tokens * weight.shape[1] for weight in outer}.values())
        where = "tied embedding" if outer[0] is outer[1] else "embedding and output head"
        found.append(
            f"{counted(tokens, 'new token')}: {rows:,} parameters of the {where} are trained for them"
        )
    if names:
        whole = modules_to_save(model, names)
        weights = {id(p): p.numel() for name in whole for p in model.get_submodule(name).parameters()}
        found.append(
            f"{sum(weights.values()):,} parameters of {counted(len(whole), 'module')} are trained whole "
            f"(tuning.lora.modules_to_save: {', '.join(names)})"
        )
    return found
