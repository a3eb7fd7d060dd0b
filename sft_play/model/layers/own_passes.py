"""How norms and rotary embeddings compute: in fewer passes than in transformers, with the same values.

Autograd differentiates each small operation of theirs by itself and keeps what each of them needs. Here both
are one function with a backward pass of its own, which keeps little and computes in place. Most decoders in
transformers have a copy of Llama's code, by which they are found.

On a CPU a step takes less time (benchmarks/results/adapter_step_cpu.json). GPUs compute so too, where it has
not been measured.
"""

import inspect
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from types import FunctionType, MethodType
from typing import Any

import torch
from transformers.models.llama import modeling_llama

from sft_play.choices.kernels import LAYERS
from sft_play.upstream.accelerate import place_of_forward
from sft_play.upstream.torch import changed_in_place


def code_of(kernels: str) -> Any:
    """The module with what `train.kernels` stands for: the passes here, or those of a row of `LAYERS`.

    It has `norm_forward` and `rotated` as here, and `forward_for`: what takes the place of the forward pass
    of another module, or None. That of a row also has `STAND_INS`: name of a function that calls a kernel ->
    what computes in its place in a trace.
    """
    return import_module(LAYERS[kernels].code if kernels in LAYERS else __name__)


def forward_for(module: torch.nn.Module) -> None:
    """Other modules compute as they do in transformers."""


def same_code(function: object, known: object) -> bool:
    """Whether a function does what a known one does, by its code, numbers and defaults."""

    def code(found: Any) -> Any:
        code = found.__code__
        numbers = [each for each in code.co_consts if isinstance(each, int | float)]
        return code.co_code, code.co_names, numbers, found.__defaults__

    return hasattr(function, "__code__") and code(function) == code(known)


def replace_forwards(model: torch.nn.Module, kernels: str = "own") -> int:
    """Lets modules with Llama's code compute in fewer passes, or by other `kernels`, before adapters come.

    It returns how many modules these are.
    """
    forwards = _forwards(model, kernels)
    for module, forward in forwards.items():
        replace_forward(module, forward)
    return len(forwards)


def forwards_with(model: torch.nn.Module, kernels: str, *, instead_of: str) -> dict[torch.nn.Module, Any]:
    """Module -> how it computes with kernels in place of others; what neither serves is left out."""
    if kernels == instead_of:
        return {}
    served = {
        module for module, forward in _forwards(model, instead_of).items() if forward_of(module) == forward
    }
    return {module: MethodType(type(module).forward, module) for module in served} | _forwards(model, kernels)


def _forwards(model: torch.nn.Module, kernels: str) -> dict[torch.nn.Module, Any]:
    """Module -> how it computes with kernels, of those that they serve."""
    code, forwards = code_of(kernels), dict[torch.nn.Module, Any]()
    replacements = {kind: _replacement(kind, code) for kind in set(map(type, model.modules()))}
    for module in model.modules():
        if forward := replacements[type(module)] or code.forward_for(module):
            forwards[module] = MethodType(forward, module)
    return forwards


def replace_forward(module: torch.nn.Module, forward: object) -> None:
    """Lets a module compute by another function of its arguments."""
    setattr(module, place_of_forward(module), forward)


def forward_of(module: torch.nn.Module) -> Any:
    """The function by which a module computes now."""
    return getattr(module, place_of_forward(module))


def _replacement(kind: type, code: Any) -> Any:
    """What to put in the place of the forward pass of a module of this class; None for those that stay."""
    if not kind.__module__.startswith("transformers.models."):
        return None
    # transformers 5.24 wraps it to take the old names of arguments
    forward: Any = inspect.unwrap(kind.forward)  # type: ignore[attr-defined]
    if same_code(forward, modeling_llama.LlamaRMSNorm.forward):
        return code.norm_forward
    return _with_rotation(forward, code.rotated) if _rotates_as_llama(forward) else None


def _rotates_as_llama(forward: FunctionType) -> bool:
    """Whether the function calls what Llama's attention rotates queries and keys with."""
    rotate = forward.__globals__.get("apply_rotary_pos_emb")
    if "apply_rotary_pos_emb" not in forward.__code__.co_names or not isinstance(rotate, FunctionType):
        return False
    halves = rotate.__globals__.get("rotate_half")
    return same_code(rotate, modeling_llama.apply_rotary_pos_emb) and same_code(
        halves, modeling_llama.rotate_half
    )


@cache  # one function for all models, whose compiled code serves them all
def _with_rotation(forward: FunctionType, rotate: object) -> FunctionType:
    """The same function with another `apply_rotary_pos_emb`; others that call that one are not touched."""
    names = forward.__globals__ | {"apply_rotary_pos_emb": rotate}
    code = forward.__code__.replace()  # what it is compiled to is kept with it, and has these names
    copy = FunctionType(code, names, None, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def norm_forward(module: torch.nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    """As in Llama; `hidden_states` and the result are [..., hidden_size]."""
    return RMSNorm.apply(hidden_states, module.weight, module.variance_epsilon)


def rotated(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys with their positions, in place of Llama's `apply_rotary_pos_emb`.

    q is [batch, heads, tokens, head_dim], k [batch, key_value_heads, tokens, head_dim], cos and sin are
    [batch, tokens, head_dim]; the results have the shapes of q and k.
    """
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return Rotation.apply(q, cos, sin), Rotation.apply(k, cos, sin)


class RMSNorm(torch.autograd.Function):
    """`weight * x / sqrt(mean(x**2) + eps)`, computed in fp32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalizes x, [..., size], and keeps it; the weight is [size]."""
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        normed = (wide * scale).to(x.dtype)
        return changed_in_place(normed.mul_(weight)) if normed.dtype == weight.dtype else normed * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of x and, if it is trained, of the weight."""
        x, weight, scale = ctx.saved_tensors
        wide, weight_grad = x.float(), None
        if ctx.needs_input_grad[1]:
            weight_grad = (grad * (wide * scale).to(x.dtype)).sum_to_size(weight.shape)
        towards = grad.float() * weight
        along = (towards * wide).sum(-1, keepdim=True).mul_(scale.pow(3)).div_(x.shape[-1])
        return towards.mul_(scale).addcmul_(wide, along, value=-1).to(x.dtype), weight_grad, None


class Rotation(torch.autograd.Function):
    """`x * cos + rotate_half(x) * sin`; its gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotates x, [batch, heads, tokens, head_dim], by angles whose cos and sin broadcast to it."""
        ctx.save_for_backward(cos, sin)
        out = x * cos
        _add_halves(out, x, sin.chunk(2, dim=-1), sign=1)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """The gradient of x, [batch, heads, tokens, head_dim]."""
        cos, sin = ctx.saved_tensors
        out = grad * cos
        _add_halves(out, grad, sin.chunk(2, dim=-1)[::-1], sign=-1)
        return out, None, None


def _add_halves(out: torch.Tensor, x: torch.Tensor, sines: Sequence[torch.Tensor], *, sign: int) -> None:
    """Adds the second half of x to the first half of `out`, times -sign, and the first to the second."""
    first, second = x.chunk(2, dim=-1)
    out_first, out_second = out.chunk(2, dim=-1)
    out_first.addcmul_(second, sines[0], value=-sign)
    out_second.addcmul_(first, sines[1], value=sign)
