"""Norms, rotary embeddings and gated layers by Liger's Triton kernels, which train.kernels=liger asks for.

They replace our own passes (`own_passes`) on the classes that these know, the norms of Gemma, and the
products of SwiGLU and GeGLU.
Liger's functions are called one by one, instead of `use_liger_kernel`: that exchanges classes and functions
in the modules of transformers, for all models of the process, and a forward pass that the output head
replaces. The output head stays TRL's, which is one of Triton too and never makes the logits either.

In a trace, autograd functions that compute nothing stand in for them: they allocate and keep what Liger's do,
after liger_kernel 0.8: ops/rms_norm.py, ops/rope.py, ops/swiglu.py, ops/geglu.py.
"""

from collections.abc import Callable
from inspect import isfunction
from typing import Any

import torch

from sft_play.model.layers.own_passes import same_code
from sft_play.model.layers.stand_in import counted
from sft_play.work import ELEMENTWISE, IN_PLACE

# Rows of partial sums of a norm's gradient, one for each multiprocessor: an H100's. They live for a moment.
MULTIPROCESSORS = 132


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """`own_passes.RMSNorm` by Liger's kernel; x is [..., size], the weight [size].

    With an offset, that is added to the weight, all is computed in fp32, as in Gemma. The gradient does not
    take the place of that of the result, as Liger does by default: after a residual sum, as of norms behind a
    layer, that one belongs to another branch too.
    """
    from liger_kernel.ops import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(x, weight, eps, offset, "gemma" if offset else "llama", False, None)


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`own_passes.rotated` by Liger's kernel, which writes into q and k; shapes as there."""
    from liger_kernel.ops import LigerRopeFunction

    return LigerRopeFunction.apply(q, k, cos, sin)


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of [..., size] by Liger's kernel, whose gradients take the place of both."""
    from liger_kernel.ops import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(gate, up, 1.0, 1.0)


def gelu_gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """As `gated`, of [..., size], by GELU in its approximation by tanh."""
    from liger_kernel.ops import LigerGELUMulFunction

    return LigerGELUMulFunction.apply(gate, up)


def rotated(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of Llama's `apply_rotary_pos_emb`; shapes as in `own_passes.rotated`."""
    return rotate(q, k, cos, sin)


def swiglu_forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The forward pass of Llama's gated layer; x and the result are [..., hidden_size]."""
    return module.down_proj(gated(module.gate_proj(x), module.up_proj(x)))


def geglu_forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The same of Gemma's, which has GELU; x and the result are [..., hidden_size]."""
    return module.down_proj(gelu_gated(module.gate_proj(x), module.up_proj(x)))


def norm_forward(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """As in Llama; `hidden_states` and the result are [..., hidden_size]."""
    return norm(hidden_states, module.weight, module.variance_epsilon)


def offset_norm_forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    """As in Gemma, whose weights are differences from 1; x and the result are [..., hidden_size]."""
    return norm(x, module.weight, module.eps, 1.0)


def forward_for(module: torch.nn.Module) -> Callable[..., torch.Tensor] | None:
    """What to put in the place of the forward pass of a gated layer, or of a norm as in Gemma; else None."""
    from torch.nn import SiLU
    from transformers.activations import GELUTanh, SiLUActivation
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaMLP

    kind = type(module)
    if not kind.__module__.startswith("transformers.models."):
        return None
    if _same(kind, GemmaRMSNorm):
        return offset_norm_forward
    if not _same(kind, LlamaMLP):
        return None
    if isinstance(module.act_fn, (SiLUActivation, SiLU)):
        return swiglu_forward
    return geglu_forward if isinstance(module.act_fn, GELUTanh) else None


def _same(kind: type, known: type) -> bool:
    """Whether a class computes by the code of a known one, however its modules are made and said."""
    own = [name for name, value in vars(known).items() if isfunction(value)]
    names = set(own) - {"__init__", "extra_repr"}
    return all(same_code(getattr(kind, name, None), getattr(known, name)) for name in names)


class FakeNorm(torch.autograd.Function):
    """A norm of [..., size] by a weight of [size]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Keeps the input and a factor in fp32 for each row."""
        x = x.contiguous()
        out = x.new_empty(x.shape)
        factors = x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)
        counted(ELEMENTWISE, x, 0, moved=x.nbytes + out.nbytes)
        ctx.save_for_backward(x, weight, factors)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradient of the input is a tensor of its own; that of the weight is summed in fp32."""
        x, weight, _ = ctx.saved_tensors
        grad, sums = grad.contiguous(), None
        if ctx.needs_input_grad[1]:
            sums = x.new_empty((MULTIPROCESSORS, x.shape[-1]), dtype=torch.float32)
        x_grad = torch.zeros_like(grad)
        counted(ELEMENTWISE, x, 0, moved=x.nbytes + grad.nbytes + x_grad.nbytes)
        return x_grad, None if sums is None else sums.sum(dim=0).to(weight.dtype)


class FakeRotation(torch.autograd.Function):
    """Queries [batch, heads, tokens, head_dim] and keys of fewer heads are rotated where they are."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keeps cos and sin, [batch, tokens, head_dim]; heads that do not lie behind tokens are copied."""
        ctx.save_for_backward(cos.contiguous(), sin.contiguous())
        return _in_place(q), _in_place(k)

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """As forward, for the gradients."""
        return _in_place(grads[0]), _in_place(grads[1]), None, None


def _in_place(heads: torch.Tensor) -> torch.Tensor:
    """One kernel that changes [batch, heads, tokens, head_dim], if its tokens lie in front of its heads."""
    out = heads.transpose(1, 2).contiguous()
    counted(IN_PLACE, out, 0, moved=2 * out.nbytes)
    return out.transpose(1, 2)


class FakeGated(torch.autograd.Function):
    """The product of SwiGLU or GeGLU, of any shape."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Keeps both inputs."""
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        counted(ELEMENTWISE, gate, 0, moved=3 * gate.nbytes)
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients take the place of the inputs."""
        gate, up = ctx.saved_tensors
        grad = grad.contiguous()
        counted(IN_PLACE, gate, 0, moved=3 * gate.nbytes + 2 * up.nbytes)
        return gate, up


# What computes in a trace in place of the functions of these names, on fake tensors.
STAND_INS: dict[str, Callable[..., Any]] = {
    "norm": lambda x, weight, eps, offset=0.0: FakeNorm.apply(x, weight),
    "rotate": lambda q, k, cos, sin: FakeRotation.apply(q, k, cos, sin),
    "gated": lambda gate, up: FakeGated.apply(gate, up),
    "gelu_gated": lambda gate, up: FakeGated.apply(gate, up),
}
