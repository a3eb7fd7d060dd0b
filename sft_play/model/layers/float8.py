"""Linear layers that multiply in float8 by torchao, which train.float8 asks for.

Scales are those of a token's values or of a row of weights (torchao's recipe "rowwise"): with one scale for a
whole tensor, what a token becomes would depend on the others of its micro-batch. Weights stay as they are, so
that checkpoints do not change; passes without gradients multiply as the saved model does.
"""

from __future__ import annotations

from dataclasses import replace
from types import MethodType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MULTIPLE = 16  # of which the kernels need both sizes of a weight


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

    from sft_play.model.architecture.shape import decoder_layers

    recipe = replace(Float8LinearConfig.from_recipe_name("rowwise"), pad_inner_dim=True)
    for layer in decoder_layers(model)[2]:
        served = [name for name, module in layer.named_modules() if is_served(module)]
        convert_to_float8_training(layer, module_filter_fn=is_served, config=recipe)
        for linear in map(layer.get_submodule, served):
            linear.forward = MethodType(_forward, linear)


def _forward(linear: object, x: torch.Tensor) -> torch.Tensor:
    """As the linear layer of float8 or, without gradients, as any; x and the result are [..., features]."""
    import torch

    kind: Any = type(linear) if torch.is_grad_enabled() else torch.nn.Linear
    return kind.forward(linear, x)
