"""What fused kernels of published steps allocate and keep: those of fms-acceleration, on fake tensors.

They are Unsloth's (norms, rotations, cross entropy) and Liger's fused linear cross entropy of 2024. After
fms_acceleration_foak/kernels/unsloth/*.py and fused_ops/liger_ce/*.py, at the commits of the published rows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from sft_play.model.layers import liger, own_passes
from sft_play.model.layers.stand_in import counted
from sft_play.sizing.recording.operations import nbytes
from sft_play.upstream.patching import patched
from sft_play.work import ELEMENTWISE, IN_PLACE

VOCABULARY_CHUNK = 65536  # of the cross entropy


class RMSNorm(torch.autograd.Function):
    """A norm whose gradient takes the place of that of the result; its weight gets none."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Keeps the input, [..., size], and a factor in fp32 for each row."""
        out = x.new_empty(x.shape)
        factors = x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)
        counted(ELEMENTWISE, x, 0, moved=nbytes(x) + nbytes(out))
        ctx.save_for_backward(x, weight, factors)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradient, changed in place."""
        counted(IN_PLACE, grad, 0, moved=3 * nbytes(grad))
        return grad, None


class CrossEntropy(torch.autograd.Function):
    """Losses of logits, [tokens, vocabulary], in whose place their gradient is put."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        """Keeps the logits and the log-sum-exp of each row, for large vocabularies computed in chunks."""
        chunks = -(-logits.shape[1] // VOCABULARY_CHUNK)
        losses = logits.new_empty(len(logits), dtype=torch.float32)
        sums = logits.new_empty((len(logits), chunks), dtype=torch.float32)
        counted(ELEMENTWISE, logits, 0, moved=nbytes(logits))
        ctx.save_for_backward(logits, sums if chunks == 1 else torch.logsumexp(sums, dim=1))
        return losses

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """The logits, which hold the gradient now."""
        logits = ctx.saved_tensors[0]
        counted(IN_PLACE, logits, 0, moved=2 * nbytes(logits))
        return logits


class LinearCrossEntropy(torch.autograd.Function):
    """The loss of hidden states, [tokens, hidden_size], a chunk of whose logits is there at a time."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Takes the gradients too, of which it keeps those of the states and of a trained weight."""
        (tokens, size), vocabulary = hidden.shape, weight.shape[0]
        chunk = 1 << (-(-tokens // -(-vocabulary // size)) - 1).bit_length()  # a power of two
        weight_grad = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        hidden_grad = torch.zeros_like(hidden)
        losses = hidden.new_zeros(tokens, dtype=torch.float32)
        share = hidden.new_ones((), dtype=torch.float32)  # of the tokens that are supervised
        for start in range(0, tokens, chunk):
            states = hidden[start : start + chunk]
            logits = states @ weight.t()
            logits = logits.float()
            counted(IN_PLACE, logits, 0, moved=3 * nbytes(logits))
            logits = logits.to(dtype)
            grads = logits * share
            hidden_grad[start : start + chunk] = grads @ weight
            if weight_grad is not None:
                torch.addmm(weight_grad, logits.t(), states, out=weight_grad)
        ctx.save_for_backward(hidden_grad, weight_grad)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Both gradients as they are."""
        return *ctx.saved_tensors, None


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """In place of `model.layers.liger.norm`; shapes as there."""
    return RMSNorm.apply(x, weight)


def replace_forwards(model: torch.nn.Module) -> None:
    """Lets a model compute norms, whose weights are not trained then, and rotations by such kernels."""
    with patched(liger, "forward_for", lambda module: None):  # gated layers stay
        own_passes.replace_forwards(model, "liger")
    for module in model.modules():
        if getattr(module.forward, "__func__", None) is liger.norm_forward:
            module.get_parameter("weight").requires_grad_(False)


@contextmanager
def simulated() -> Iterator[None]:
    """Within `simulate_cuda`: the kernels of `replace_forwards` are those of this module."""
    with patched(liger, "norm", norm), patched(liger, "rotate", liger.STAND_INS["rotate"]):
        yield


def shifted_loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
    """The scalar loss of logits [rows, tokens, vocabulary], copied in fp32 without the last token."""
    logits = logits.float()
    losses = CrossEntropy.apply(logits[..., :-1, :].contiguous().view(-1, vocab_size))
    return losses.sum() / losses.numel()


def linear_loss(model: Any, dtype: torch.dtype) -> None:
    """Lets a causal language model return its loss without logits; `dtype` is that of its products."""

    def forward(labels: torch.Tensor, **inputs: Any) -> CausalLMOutputWithPast:
        hidden = model.base_model(**inputs)[0]
        states = hidden[..., :-1, :].contiguous().view(-1, hidden.shape[-1])
        return CausalLMOutputWithPast(loss=LinearCrossEntropy.apply(states, model.lm_head.weight, dtype))

    model.forward = forward
