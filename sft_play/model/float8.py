"""Linear layers that multiply in float8 by torchao, which train.float8 asks for.

Scales are those of a token's values or of a row of weights (torchao's recipe "rowwise"): with one scale for a
whole tensor, what a token becomes would depend on the others of its micro-batch. Weights stay as they are, so
that checkpoints do not change; passes without gradients multiply as the saved model does.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from types import MethodType
from typing import TYPE_CHECKING, Any

from sft_play.errors import ConfigError
from sft_play.extras import install_command
from sft_play.model.attention_table import Capability, Span, within

if TYPE_CHECKING:
    import torch

# PyTorch has such products for Blackwell of workstations (12.x) too, where they were reported to fail:
# https://github.com/pytorch/pytorch/issues/192707
GPUS: tuple[Span, ...] = (((8, 9), (9, 1)), ((10, 0), (11, 0)))
MULTIPLE = 16  # of which the kernels need both sizes of a weight


def is_installed() -> bool:
    """Whether torchao can be imported, which is found out without doing so: it takes seconds."""
    return find_spec("torchao") is not None


def require_runnable(device: str, name: str, capability: Capability | None, *, here: bool) -> None:
    """Refuses float8 on devices that have no such products, and `here` without torchao.

    Raises:
        ConfigError: the device cannot run them, or the package is missing.
    """
    if device != "cuda" or (capability is not None and not within(capability, GPUS)):
        found = "{} ({}.{})".format(name, *capability or ()) if device == "cuda" else "the CPU"
        raise ConfigError(
            "train.float8=true needs a GPU of compute capability 8.9 (Ada), 9.0 (Hopper) or 10.x (Blackwell "
            f"of data centers), and this is {found}; set train.float8=false"
        )
    if here and not is_installed():
        raise ConfigError(
            f"train.float8=true needs the package torchao, which is not installed; run "
            f"`{install_command('float8')}`, or set train.float8=false"
        )


def is_served(module: torch.nn.Module, name: str = "") -> bool:
    """Whether a module of a decoder layer multiplies in float8: plain linear layers of fitting sizes."""
    import torch

    if type(module) is not torch.nn.Linear:
        return False
    return module.in_features % MULTIPLE == module.out_features % MULTIPLE == 0


def convert_layers(model: Any) -> None:
    """Lets the linear layers of a model's decoder layers multiply in float8 where gradients follow.

    Rows of any lengths have any number of tokens, which is padded where the products need a multiple of 16.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    from sft_play.model.architecture import decoder_layers

    recipe = replace(Float8LinearConfig.from_recipe_name("rowwise"), pad_inner_dim=True)
    for layer in decoder_layers(model)[2]:
        served = [name for name, module in layer.named_modules() if is_served(module)]
        convert_to_float8_training(layer, module_filter_fn=is_served, config=recipe)
        for linear in map(layer.get_submodule, served):
            linear.forward = MethodType(_forward, linear)


def _forward(linear: Any, x: torch.Tensor) -> torch.Tensor:
    """As the linear layer of float8 or, without gradients, as any; x and the result are [..., features]."""
    import torch

    kind: Any = type(linear) if torch.is_grad_enabled() else torch.nn.Linear
    return kind.forward(linear, x)
