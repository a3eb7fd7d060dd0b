"""How LoRA layers compute: in fewer passes over their outputs than PEFT, with the same values."""

from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import LoraVariant
from peft.tuners.tuners_utils import BaseTunerLayer

if TYPE_CHECKING:
    from peft import PeftModel


def speed_up(model: "PeftModel", *, autocast: bool) -> None:
    """Lets the adapters of a model compute with fewer copies; not for DoRA.

    Args:
        model: with adapters on linear layers or fused experts.
        autocast: every forward pass will run under autocast.
    """
    for module in model.modules():
        if autocast and isinstance(module, BaseTunerLayer):
            leave_types_to_autocast(module)
        if isinstance(module, LoraLayer) and isinstance(module.get_base_layer(), torch.nn.Linear):
            for name in module.active_adapters:
                module.lora_variant.setdefault(name, AddedInPlace())


def leave_types_to_autocast(layer: Any) -> None:
    """Gives an adapter the input of its layer as it is, for forward passes under autocast.

    PEFT converts an input to the type of the adapter, fp32, and autocast converts it back: one more 16-bit
    copy of each layer's input that is kept for the backward pass. The values are the same.
    """
    layer.cast_input_dtype_enabled = False


class AddedInPlace(LoraVariant):
    """A LoRA layer that adds its part to the output of the base layer as it multiplies.

    PEFT writes the product, then the scaled product, then the sum, each as large as the layer's output.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        module: Any, active_adapter: str, x: torch.Tensor, result: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        """The output of base layer and adapter.

        Args:
            module: the layer.
            active_adapter: name of the adapter.
            x: the input, [batch, tokens, in].
            result: the output of the base layer, [batch, tokens, out]; overwritten.

        Returns:
            [batch, tokens, out].
        """
        low = module.lora_A[active_adapter](module.lora_dropout[active_adapter](x))
        up, scaling = module.lora_B[active_adapter], module.scaling[active_adapter]
        # Autograd copies the gradient of a view that was changed: a linear layer with a bias returns one.
        if result.dim() != 3 or result.dtype != low.dtype or result._is_view():
            return result + up(low) * scaling
        weight = up.weight.to(low.dtype).t().expand(len(low), -1, -1)
        return result.baddbmm_(low, weight, alpha=scaling)
