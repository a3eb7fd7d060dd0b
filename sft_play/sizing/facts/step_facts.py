"""What the planner asks about steps of an architecture. Each answer takes libraries: `Architecture` keeps it.

Arguments are all that an answer depends on besides the architecture, whose own facts are in `model_facts`.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from sft_play.choices import optimizers
from sft_play.choices.kernels import Capability
from sft_play.config.schema import LoraSettings
from sft_play.model.attention.table import ATTENTIONS
from sft_play.reasons import method
from sft_play.sizing.step import StepSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def state_bytes(config: "PretrainedConfig", optimizer: str, device: str, elements: int) -> int:
    """As in `choices.optimizers`."""
    return optimizers.state_bytes(optimizer, device, elements)


def trained_elements(
    config: "PretrainedConfig", mode: str, lora: LoraSettings, new_tokens: int, vision: str
) -> list[list[int]]:
    """As `fake_model.trained_elements`."""
    from sft_play.sizing.trace.fake_model import trained_elements

    return trained_elements(config, StepSpec(mode=mode, lora=lora, new_tokens=new_tokens, vision=vision))


def update_bytes(config: "PretrainedConfig", optimizer: str, device: str, elements: int) -> int:
    """As `trace.update_bytes`."""
    from sft_play.sizing.trace.trace import update_bytes

    return update_bytes(StepSpec(mode="full", optimizer=optimizer, device=device), elements)


def attention(
    config: "PretrainedConfig", asked: str, device: str, capability: tuple[int, int] | None, dtype: str
) -> str:
    """As `choose_attention`; with a package it also depends on the GPU that is here."""
    from sft_play.model.attention.choice import choose_attention

    return choose_attention(asked, config, device, capability, dtype)


def has_attention_packages() -> bool:
    """Whether attention may come from a package, which is found out without importing it."""
    return any(find_spec(name) for row in ATTENTIONS.values() for name in row.modules)


def attention_kernel(config: "PretrainedConfig", spec: StepSpec) -> str | None:
    """As in `sizing.kernels.attention`."""
    from sft_play.sizing.kernels.attention import attention_kernel

    return attention_kernel(config, spec)


def traced_capability(
    config: "PretrainedConfig", attention: str, dtype: str, capability: Capability
) -> Capability:
    """As in `sizing.kernels.attention`."""
    from sft_play.sizing.kernels.attention import traced_capability

    return traced_capability(config, attention, dtype, capability)


def depends_on_lengths(config: "PretrainedConfig", spec: StepSpec) -> bool:
    """As in `sizing.kernels.attention`."""
    from sft_play.sizing.kernels.attention import depends_on_lengths

    return depends_on_lengths(config, spec)


def also_trained(
    config: "PretrainedConfig", tokens: int, names: tuple[str, ...]
) -> tuple[str | None, str | None]:
    """The rows of so many new tokens, and the modules that an adapter's modules_to_save names.

    Raises:
        ConfigError: this model has no such module.
    """
    from sft_play.model.adapters.targets import modules_to_save
    from sft_play.model.architecture.shape import empty_model

    model: Any = empty_model(config)
    rows = whole = None
    if tokens:
        outer = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
        parameters = sum({id(weight): tokens * weight.shape[1] for weight in outer}.values())
        rows = method.new_tokens(tokens, parameters, tied=outer[0] is outer[1])
    if names:
        modules = modules_to_save(model, names)
        weights = {id(p): p.numel() for name in modules for p in model.get_submodule(name).parameters()}
        whole = method.trained_whole(sum(weights.values()), len(modules), names)
    return rows, whole
