"""What Liger's kernels allocate and keep, as autograd functions on fake tensors that compute nothing.

After liger_kernel 0.8: ops/rms_norm.py, ops/rope.py, ops/swiglu.py, ops/geglu.py.
"""

from typing import Any

import torch

from sft_play.sizing.operations import nbytes
from sft_play.sizing.recorder import counted
from sft_play.work import ELEMENTWISE, IN_PLACE

# Rows of partial sums of a norm's gradient, one for each multiprocessor: an H100's. They live for a moment.
MULTIPROCESSORS = 132


class RMSNorm(torch.autograd.Function):
    """A norm of [..., size] by a weight of [size]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Keeps the input and a factor in fp32 for each row."""
        x = x.contiguous()
        out = x.new_empty(x.shape)
        factors = x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)
        counted(ELEMENTWISE, x, 0, moved=nbytes(x) + nbytes(out))
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
        counted(ELEMENTWISE, x, 0, moved=nbytes(x) + nbytes(grad) + nbytes(x_grad))
        return x_grad, None if sums is None else sums.sum(dim=0).to(weight.dtype)


class Rotation(torch.autograd.Function):
    """Queries [batch, heads, tokens, head_dim] and keys of fewer heads are rotated where they are."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keeps cos and sin, [batch, tokens, head_dim]; heads that do not lie behind tokens are copied."""
        ctx.save_for_backward(cos.contiguous(), sin.contiguous())
        return _in_place(q), _in_place(k)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """As forward, for the gradients."""
        return _in_place(grads[0]), _in_place(grads[1]), None, None


def _in_place(heads: torch.Tensor) -> torch.Tensor:
    """One kernel that changes [batch, heads, tokens, head_dim], if its tokens lie in front of its heads."""
    out = heads.transpose(1, 2).contiguous()
    counted(IN_PLACE, out, 0, moved=2 * nbytes(out))
    return out.transpose(1, 2)


class Gated(torch.autograd.Function):
    """The product of SwiGLU or GeGLU, of any shape."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Keeps both inputs."""
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        counted(ELEMENTWISE, gate, 0, moved=3 * nbytes(gate))
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients take the place of the inputs."""
        gate, up = ctx.saved_tensors
        grad = grad.contiguous()
        counted(IN_PLACE, gate, 0, moved=3 * nbytes(gate) + 2 * nbytes(up))
        return gate, up


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """In place of `model.liger.norm`; shapes as there."""
    return RMSNorm.apply(x, weight)


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of `model.liger.rotate`; shapes as there."""
    return Rotation.apply(q, k, cos, sin)


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """In place of `model.liger.gated`; shapes as there."""
    return Gated.apply(gate, up)


def gelu_gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """In place of `model.liger.gelu_gated`; shapes as there."""
    return Gated.apply(gate, up)
