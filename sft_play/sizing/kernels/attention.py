"""What CUDA's attention kernels allocate and keep, as an autograd function on fake tensors.

It computes nothing, but counts the work of the kernels. What differs among them: `model/attention/table.py`.
"""

import sys
from collections.abc import Callable
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from sft_play.choices.kernels import Capability, within
from sft_play.model.architecture.shape import setting
from sft_play.model.attention.choice import attention_dropout, has_sinks
from sft_play.model.attention.table import ATTENTIONS, EFFICIENT, JOINED, NAME, Call, Kernel, fused_kernel
from sft_play.model.attention.varlen import type_name
from sft_play.model.layers.stand_in import counted
from sft_play.sizing.recording.operations import nbytes
from sft_play.sizing.step import StepSpec
from sft_play.work import ATTENTION, ATTENTION_BACKWARD, TRANSCENDENTAL

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class FusedAttention(torch.autograd.Function):
    """What a kernel allocates and keeps; it computes nothing.

    Query, key and value are [batch, heads, tokens, head_dim], or if joined [tokens, heads, head_dim]; key and
    value have fewer heads if queries are grouped. The mask is None or broadcastable to [batch, heads, tokens,
    tokens]. The kernel turns it into a bias of the query's dtype.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        kernel: Kernel,
        call: Call,
    ) -> torch.Tensor:
        """Saves inputs, output, bias and what the kernel keeps; returns the shape of the query."""
        kept: list[torch.Tensor] = []
        if mask is not None:
            kept.append(query.new_empty((*mask.shape[:-1], -(-mask.shape[-1] // 16) * 16)))
        out = _result(query, value.shape[-1])
        kept += _blocks(query, kernel.kept(call))
        triangles = 1 + (mask is not None)  # masked: both
        ctx.width = triangles * call.heads * call.head_dim
        counted(ATTENTION, query, call.batch * call.tokens, k=ctx.width)
        ctx.kernel, ctx.call = kernel, call
        ctx.save_for_backward(query, key, value, out, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Allocates the gradients of query, key and value, and a workspace."""
        query, key, value, out, *_ = ctx.saved_tensors
        counted(ATTENTION_BACKWARD, query, ctx.call.batch * ctx.call.tokens, k=ctx.width)
        d_query, d_key, d_value = (_result(tensor, tensor.shape[-1]) for tensor in (query, key, value))
        # Named, so that each stays alive until this function returns, as it does in the kernel.
        if not ctx.kernel.row_products(ctx.call):
            products = (grads[0].float() * out.float()).sum(-1)  # noqa: F841
        workspace = _blocks(query, ctx.kernel.workspace(ctx.call))  # noqa: F841
        return d_query, d_key, d_value, None, None, None


def _result(like: torch.Tensor, width: int) -> torch.Tensor:
    """A result like an input, [batch, heads, tokens, width] with tokens in front of heads in memory.

    Or [tokens, heads, width], as the input.
    """
    if like.dim() == 3:
        return like.new_empty((*like.shape[:2], width))
    batch, heads, tokens, _ = like.shape
    return like.new_empty((batch, tokens, heads, width)).transpose(1, 2)


def _blocks(like: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """Blocks of so many bytes on the device of a tensor of any shape."""
    return [like.new_empty((size,), dtype=torch.uint8) for size in sizes]


def _call_of(query: torch.Tensor, key: torch.Tensor, capability: Capability, **lengths: int) -> Call:
    """The call for a query and a key, [batch, heads, tokens, head_dim] or [tokens, heads, head_dim]."""
    joined = query.dim() == 3
    batch, tokens = (1, query.shape[0]) if joined else (query.shape[0], query.shape[2])
    return Call(
        batch=batch, heads=query.shape[1], key_heads=key.shape[1], tokens=tokens, head_dim=query.shape[-1],
        dtype=type_name(query.dtype), capability=capability, **lengths,
    )  # fmt: skip


def softmax_backward(
    grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
) -> torch.Tensor:
    """CUDA's gradient of softmax multiplies gradient and output, of any shape, into a tensor of its own."""
    result = output.new_empty(output.shape, dtype=input_dtype)
    product = torch.empty_like(grad)  # noqa: F841
    counted(TRANSCENDENTAL, grad, 0, moved=nbytes(grad) + nbytes(output) + nbytes(result))
    return result


def safe_softmax(scores: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The math kernel's softmax of scores of any shape, which clears rows that are masked everywhere.

    As in the versions of PyTorch that were measured on GPUs; in 2.13, the result is no tensor of its own.
    """
    plain = scores.new_empty(scores.shape, dtype=dtype or scores.dtype)
    masked = scores.new_empty(scores.shape, dtype=torch.bool)  # noqa: F841
    counted(TRANSCENDENTAL, scores, 0, moved=2 * nbytes(scores) + 2 * nbytes(plain))
    return torch.empty_like(plain)


def cuda_attention(longest: int, capability: Capability) -> Callable:
    """A replacement of `scaled_dot_product_attention` that chooses among kernels as a CUDA device does.

    Query is [batch, heads, tokens, head_dim]; key and value may have fewer heads (grouped queries). The
    result has the shape of the query. The tokens of the longest sequence in one call size the flash kernel's
    accumulator.
    """

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            query, key, value = (tensor.to(torch.get_autocast_dtype("cpu")) for tensor in (query, key, value))
        kernel = fused_kernel(
            capability,
            type_name(query.dtype),
            query.shape[-1],
            grouped=query.shape[1] != key.shape[1],
            masked=attn_mask is not None or value.shape[-1] != query.shape[-1],
            dropout=dropout_p,
        )
        if kernel:
            call = _call_of(query, key, capability, longest=longest, sequence_tokens=longest)
            return FusedAttention.apply(query, key, value, attn_mask, kernel, call)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )

    return attend


def varlen_attention(spec: StepSpec) -> Callable:
    """A replacement of `torch.nn.attention.varlen.varlen_attn` that allocates what its kernel does.

    Also that of FlashAttention's packages. A trace has fewer and longer sequences than the step.
    """
    kernel = ATTENTIONS[spec.kernels.attention].joined

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: object, **options: object
    ) -> torch.Tensor:
        return FusedAttention.apply(query, key, value, None, kernel, _joined_call(query, key, spec))

    return attend


def joined_workspace(spec: StepSpec) -> Callable:
    """What the kernel of joined sequences allocates besides gradients, for its operation in compiled code."""

    def workspace(_: object, query: torch.Tensor, key: torch.Tensor, *args: object) -> list[torch.Tensor]:
        kernel = ATTENTIONS[spec.kernels.attention].joined
        return _blocks(query, kernel.workspace(_joined_call(query, key, spec)))

    return workspace


def _joined_call(query: torch.Tensor, key: torch.Tensor, spec: StepSpec) -> Call:
    """The call for joined sequences, [tokens, heads, head_dim]."""
    longest = spec.longest_sequence
    lengths = dict(longest=longest, sequence_tokens=spec.sequence_tokens or longest)
    return _call_of(query, key, spec.compute_capability, **lengths)


def takes_one_call(config: "PretrainedConfig", spec: StepSpec) -> bool:
    """Whether one call of attention serves all sequences that are joined."""
    is_gpu = spec.joined and spec.device == "cuda" and not has_sinks(config)
    return is_gpu and ATTENTIONS[spec.kernels.attention].joined.takes(
        *_heads_of(config, spec), dropout=attention_dropout(config)
    )


def _heads_of(config: "PretrainedConfig", spec: StepSpec) -> tuple[Capability, str, int]:
    """The GPU, the type in which attention computes, and the size of heads."""
    text = config.get_text_config()
    head_dim = setting(text, "head_dim") or text.hidden_size // text.num_attention_heads
    return spec.compute_capability, spec.precision.computed_in, head_dim


def attention_kernel(config: "PretrainedConfig", spec: StepSpec) -> str | None:
    """The kernel of attention that a GPU runs, for the plan; None for a CPU, and for masks."""
    row = ATTENTIONS[spec.kernels.attention]
    if spec.device == "cpu" or not row.boundaries:
        return None
    one_call = row.is_package or takes_one_call(config, spec)
    kernel = row.joined if one_call else fused_kernel(*_heads_of(config, spec), masked=False) or EFFICIENT
    calls = "one call for all rows of a micro-batch" if one_call else "a call for each row"
    return f"attention: {kernel.label}, {calls if spec.joined else 'rows are padded'}"


def traced_capability(
    config: "PretrainedConfig", attention: str, dtype: str, capability: Capability
) -> Capability:
    """The GPU whose traces serve this one too, if rows are joined and attention computes in this type.

    Where nothing but the flash kernel computes it, with heads that it takes on all of its GPUs, these
    allocate the same.
    """
    text, (gpus, types, widths, _) = config.get_text_config(), astuple(JOINED.inputs[0])
    sizes = {value for name, value in vars(text).items() if "head_dim" in name and isinstance(value, int)}
    head_dim = next(iter(sizes), None) or text.hidden_size // text.num_attention_heads
    takes = within(capability, gpus) and dtype in types and head_dim in widths
    masks = has_sinks(config) or has_window(config, sys.maxsize) or attention_dropout(config) > 0
    return gpus[0][0] if attention == NAME and takes and len(sizes) < 2 and not masks else capability


def has_window(config: "PretrainedConfig", tokens: int) -> bool:
    """Whether some layer's attention has a sliding window that is shorter than `tokens`."""
    text = config.get_text_config()
    window, kinds = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
    return window is not None and window < tokens and (kinds is None or "sliding_attention" in kinds)


def depends_on_lengths(config: "PretrainedConfig", spec: StepSpec) -> bool:
    """Whether attention over joined sequences takes memory with the square of their lengths.

    So do the masks of windows. On a CPU also scores, where keys and values have different sizes (MLA) or
    attention has dropout: its fused kernel does neither. There, sinks take a position of each sequence.
    """
    if takes_one_call(config, spec):
        return False
    if has_window(config, spec.longest_sequence) and not ATTENTIONS[spec.kernels.attention].windows:
        return True
    text = config.get_text_config()
    parts = [setting(text, f"qk_{part}_head_dim") or 0 for part in ("nope", "rope")]
    key_size = sum(parts) or setting(text, "head_dim")
    uneven = (setting(text, "v_head_dim") or key_size) != key_size
    return spec.device == "cpu" and (uneven or has_sinks(config) or attention_dropout(config) > 0)
