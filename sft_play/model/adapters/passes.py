"""How LoRA layers compute: in fewer passes over their inputs and outputs than PEFT, with the same values."""

from types import MethodType
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import LoraVariant
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.nn.functional import linear

from sft_play.model.attention.varlen import kernel_dtype
from sft_play.upstream.torch import changed_in_place, is_view


def replace_forwards(model: PeftModel, *, autocast: bool) -> None:
    """Lets the adapters of a model compute with fewer copies, also if always under autocast; not for DoRA."""
    for module in model.modules():
        if autocast and isinstance(module, BaseTunerLayer):
            # PEFT converts an input to the type of the adapter, fp32, and autocast converts it back: one more
            # 16-bit copy of each layer's input that is kept for the backward pass. The values are the same.
            layer: Any = module
            layer.cast_input_dtype_enabled = False
        if isinstance(module, LoraLayer) and isinstance(module.get_base_layer(), torch.nn.Linear):
            for name in module.active_adapters:
                module.lora_variant.setdefault(name, AddedInPlace())
            if type(module.get_base_layer()) is torch.nn.Linear:  # not one of 4 bits
                module.forward = MethodType(_forward, module)


def _forward(module: Any, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    """The output of base layer and adapter, [batch, tokens, out], for x of [batch, tokens, in]."""
    names, base = module.active_adapters, module.get_base_layer()
    plain = not (args or kwargs or module.disable_adapters or module.merged or base.weight.requires_grad)
    if plain and len(names) == 1 and isinstance(module.lora_dropout[names[0]], torch.nn.Identity):
        down, up = module.lora_A[names[0]].weight, module.lora_B[names[0]].weight
        dtype = kernel_dtype(x)
        if torch.is_autocast_enabled(x.device.type) or x.dtype == base.weight.dtype == down.dtype:
            return AdaptedLinear.apply(x, base.weight, base.bias, down, up, module.scaling[names[0]], dtype)
    return type(module).forward(module, x, *args, **kwargs)


class AdaptedLinear(torch.autograd.Function):
    """`x @ weight.T + bias + scaling * x @ down.T @ up.T` of a frozen weight and bias.

    Autograd would write the two gradients of x, each as large as the layer's input, and then their sum.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        down: torch.Tensor,
        up: torch.Tensor,
        scaling: float,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """The output of base layer and adapter, [..., out], computed in `dtype`.

        x is [..., in], weight [out, in], bias [out] or None, the adapter's A (`down`) [rank, in] and its B
        (`up`) [out, rank].
        """
        x = x.to(dtype)
        low = x.flatten(0, -2) @ down.to(dtype).t()
        ctx.save_for_backward(x, low, weight, down, up)
        ctx.scaling = scaling
        out = linear(x, weight.to(dtype))  # with a bias it would be a view, which may not be changed later
        if bias is not None:
            out += bias
        out.view(-1, len(up)).addmm_(low, up.to(dtype).t(), alpha=scaling)
        return changed_in_place(out)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of x, if it has one, and of the adapter's matrices."""
        x, low, weight, down, up = ctx.saved_tensors
        grad = grad.flatten(0, -2)
        low_grad = (grad @ up.to(x.dtype)).mul_(ctx.scaling)
        down_grad = low_grad.t() @ x.flatten(0, -2)
        up_grad = (low.t() @ grad).mul_(ctx.scaling).t()
        x_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = (grad @ weight.to(x.dtype)).addmm_(low_grad, down.to(x.dtype)).view(x.shape)
        return x_grad, None, None, down_grad, up_grad, None, None


class AddedInPlace(LoraVariant):
    """A LoRA layer with dropout, or on 4-bit weights, that adds its part to the output of the base layer.

    PEFT writes the product, then the scaled product, then the sum, each as large as the layer's output.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        module: Any, active_adapter: str, x: torch.Tensor, result: torch.Tensor, **_: object
    ) -> torch.Tensor:
        """The output of base layer and adapter, in place of the base layer's `result`, [batch, tokens, out].

        x is [batch, tokens, in].
        """
        low = module.lora_A[active_adapter](module.lora_dropout[active_adapter](x))
        up, scaling = module.lora_B[active_adapter], module.scaling[active_adapter]
        # Autograd copies the gradient of a view that was changed: a linear layer with a bias returns one.
        # Compiled code has no views.
        viewed = not torch.compiler.is_compiling() and is_view(result)
        if result.dim() != 3 or result.dtype != low.dtype or viewed:
            return result + (up(low) * scaling).to(result.dtype)
        weight = up.weight.to(low.dtype).t().expand(len(low), -1, -1)
        return result.baddbmm_(low, weight, alpha=scaling)
