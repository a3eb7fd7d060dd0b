"""What CUDA's attention kernels allocate and keep, as autograd functions on fake tensors.

They compute nothing, but count the work of the kernels. Sources: PyTorch's flash_api.cpp,
attention_backward.cu, mem_eff_attention/kernel_backward.h, sdp_utils.cpp, attention.cpp and SoftMax.cu, and
FlashAttention's hopper/flash_api.cpp.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from sft_play.model.architecture import setting
from sft_play.model.attention import NAME, SIXTEEN_BIT, Capability, flash_supports, varlen_supports
from sft_play.model.attention_choice import has_sinks
from sft_play.sizing.operations import nbytes
from sft_play.sizing.recorder import counted
from sft_play.sizing.step import SIXTEEN_BIT as AUTOCAST
from sft_play.sizing.step import StepSpec
from sft_play.sizing.work import ATTENTION, ATTENTION_BACKWARD, TRANSCENDENTAL

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FLASH3_WIDTHS = 64, 96, 128, 192, 256  # head sizes that FlashAttention 3 computes with
FLASH_ROWS = 128  # the flash kernel rounds sequence lengths up to a multiple of this
SPLITS = 200  # the memory-efficient kernel splits the keys of all heads into at most so many parts
DROPOUT_NAMES = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob")
LOCK = 4  # 32-bit words of a lock in front of each tile of its accumulator


def choose_kernel(
    capability: Capability, dtype: torch.dtype, *, head_dim: int, grouped: bool, masked: bool, dropout: float
) -> str:
    """The kernel that `scaled_dot_product_attention` runs in training, after PyTorch's sdp_utils.cpp.

    Args:
        capability: compute capability of the GPU.
        dtype: of query, key and value.
        head_dim: their size per head.
        grouped: whether key and value have fewer heads than the query.
        masked: whether there is a mask.
        dropout: the probability.

    Returns:
        "flash", "efficient" or "math". cuDNN's is turned off (`sft_play.model.attention.register`).
    """
    if not masked and flash_supports(capability, dtype, head_dim, dropout):
        return "flash"
    is_sixteen = dtype in SIXTEEN_BIT
    of_whole_vectors = head_dim % (8 if is_sixteen else 4) == 0 or (capability < (8, 0) and not is_sixteen)
    is_emulated = dtype == torch.bfloat16 and capability < (8, 0)
    if grouped or is_emulated or not of_whole_vectors or capability > (12, 1):
        return "math"
    return "efficient"


class FlashAttention(torch.autograd.Function):
    """What PyTorch's flash kernel allocates and keeps; it computes nothing.

    Query is [batch, heads, tokens, head_dim]; key and value are [batch, key_value_heads, tokens, head_dim].
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, longest: int
    ) -> torch.Tensor:
        """Saves inputs, output and the log-sum-exp of each row; returns [batch, heads, tokens, head_dim]."""
        batch, heads, tokens, _ = query.shape
        out = query.new_empty((batch, tokens, heads, value.shape[-1])).transpose(1, 2)
        log_sum = query.new_empty((batch, heads, tokens), dtype=torch.float32)
        seed = torch.empty(2, dtype=torch.int64)
        counted(ATTENTION, query, batch * tokens, k=heads * query.shape[-1])
        ctx.longest = longest
        ctx.save_for_backward(query, key, value, out, log_sum, seed)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Allocates the gradients of query, key and value, and an fp32 accumulator."""
        query, key, value, out, _, _ = ctx.saved_tensors
        batch, heads, tokens, head_dim = query.shape
        rounded = -(-min(tokens, ctx.longest) // FLASH_ROWS) * FLASH_ROWS
        counted(ATTENTION_BACKWARD, query, batch * tokens, k=heads * head_dim)
        d_query, d_key, d_value = (
            t.new_empty((t.shape[0], t.shape[2], t.shape[1], t.shape[3])).transpose(1, 2)
            for t in (query, key, value)
        )
        # Named, so that each stays alive until this function returns, as it does in the kernel.
        d_softmax = query.new_empty((batch, heads, rounded), dtype=torch.float32)  # noqa: F841
        accumulator = query.new_empty((batch, rounded, heads, _flash_width(head_dim)), dtype=torch.float32)  # noqa: F841
        if key.shape[1] != heads:  # grouped queries: one gradient per query head, summed afterwards
            expanded = [query.new_empty((batch, tokens, heads, t.shape[-1])) for t in (key, value)]  # noqa: F841
        return d_query, d_key, d_value, None


class FlashVarlen(torch.autograd.Function):
    """What one call of a flash kernel for joined sequences allocates and keeps; it computes nothing.

    Query is [tokens, heads, head_dim]; key and value are [tokens, key_value_heads, head_dim].
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sequence_tokens: int,
        version: int,
    ) -> torch.Tensor:
        """Saves inputs, output and the log-sum-exp of each row; returns the shape of the query."""
        tokens, heads, head_dim = query.shape
        out = query.new_empty(query.shape)
        log_sum = query.new_empty((heads, tokens), dtype=torch.float32)
        seed = torch.empty(2, dtype=torch.int64)
        counted(ATTENTION, query, tokens, k=heads * head_dim)
        ctx.sequence_tokens, ctx.version = sequence_tokens, version
        ctx.save_for_backward(query, key, value, out, log_sum, seed)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Allocates the gradients of query, key and value, and fp32 accumulators."""
        query, key, value, *_ = ctx.saved_tensors
        counted(ATTENTION_BACKWARD, query, query.shape[0], k=query.shape[1] * query.shape[2])
        d_query, d_key, d_value = (t.new_empty(t.shape) for t in (query, key, value))
        accumulators = _flash3_accumulators if ctx.version == 3 else _flash2_accumulators
        kept = accumulators(query, key, ctx.sequence_tokens)  # noqa: F841
        return d_query, d_key, d_value, None, None


def _flash2_accumulators(query: torch.Tensor, key: torch.Tensor, sequence_tokens: int) -> list[torch.Tensor]:
    """For joined sequences, which are a tile of rows apart; shapes as in `FlashVarlen`."""
    tokens, heads, head_dim = query.shape
    rows = tokens + round(FLASH_ROWS * tokens / sequence_tokens)
    shapes = [(heads, rows), (rows, heads, _flash_width(head_dim))]
    kept = [query.new_empty(shape, dtype=torch.float32) for shape in shapes]
    if key.shape[1] != heads:  # one gradient per query head, summed afterwards
        kept += [query.new_empty((tokens, heads, head_dim)) for _ in range(2)]
    return kept


def _flash3_accumulators(query: torch.Tensor, key: torch.Tensor, sequence_tokens: int) -> list[torch.Tensor]:
    """As FlashAttention 3 (hopper/flash_api.cpp) has them on compute capability 9.0."""
    tokens, heads, head_dim = query.shape
    width = next(size for size in FLASH3_WIDTHS if head_dim <= size)
    tile, key_tile = 128 if width <= 64 else 64, {192: 96, 256: 80}.get(width, 128)
    rows, key_rows = (tokens + round(size * tokens / sequence_tokens) for size in (tile, key_tile))
    shapes = [(heads, rows), (heads, rows), (heads, rows * width)]
    if key.shape[1] != heads:
        shapes += [(key.shape[1], key_rows * width)] * 2
    return [query.new_empty(shape, dtype=torch.float32) for shape in shapes]


def _flash_width(head_dim: int) -> int:
    """The head size that the flash kernel computes with."""
    return -(-head_dim // 32) * 32 if head_dim <= 128 else -(-head_dim // 64) * 64


class EfficientAttention(torch.autograd.Function):
    """What the memory-efficient kernel allocates; it computes nothing.

    Query, key and value are [batch, heads, tokens, head_dim]; the mask is None or broadcastable to [batch,
    heads, tokens, tokens]. The kernel turns the mask into a bias of the query's dtype.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        capability: Capability,
    ) -> torch.Tensor:
        """Saves inputs, output, log-sum-exp [batch, heads, tokens] and bias; returns the shape of `query`."""
        batch, heads, tokens, _ = query.shape
        kept: list[torch.Tensor] = []
        if mask is not None:
            kept.append(query.new_empty((*mask.shape[:-1], -(-mask.shape[-1] // 16) * 16)))
        out = query.new_empty((batch, tokens, heads, value.shape[-1])).transpose(1, 2)
        log_sum = query.new_empty((batch, heads, -(-tokens // 32) * 32), dtype=torch.float32)
        ctx.triangles = 1 + (mask is not None)  # masked: both
        counted(ATTENTION, query, batch * tokens, k=ctx.triangles * heads * query.shape[-1])
        ctx.capability = capability
        ctx.save_for_backward(query, key, value, out, log_sum, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Allocates the gradients of query, key and value, and a workspace."""
        query, key, value, out, *_ = ctx.saved_tensors
        batch, heads, tokens, head_dim = query.shape
        counted(ATTENTION_BACKWARD, query, batch * tokens, k=ctx.triangles * heads * head_dim)
        d_query, d_key, d_value = (
            t.new_empty((batch, tokens, heads, t.shape[-1])).transpose(1, 2) for t in (query, key, value)
        )
        if query.dtype in SIXTEEN_BIT and (ctx.capability >= (7, 5) or head_dim <= 64):
            delta = query.new_empty((batch, heads, tokens), dtype=torch.float32)  # noqa: F841
        else:  # the kernel cannot compute it
            delta = (grads[0].float() * out.float()).sum(-1)  # noqa: F841
        elements = _efficient_workspace(query, ctx.capability)
        workspace = query.new_empty((elements,), dtype=torch.float32)  # noqa: F841
        return d_query, d_key, d_value, None, None


def _efficient_workspace(query: torch.Tensor, capability: Capability) -> int:
    """Fp32 elements of the backward kernel's workspace, for a query of [batch, heads, tokens, head_dim].

    Gradients of the query are summed up in tiles. Those of key and value are too if they do not fit into
    registers: in fp32 they go straight to the result, in 16 bit they fit for as many columns as a tile has.
    Tiles are 64 x 64, or 128 x 128 where the shared memory of a GPU holds those for heads of 65 to 128.
    """
    batch, heads, tokens, head_dim = query.shape
    is_sixteen = query.dtype in SIXTEEN_BIT
    much_shared_memory = capability in ((8, 0), (8, 7)) or (9, 0) <= capability < (12, 0)
    tile = 128 if is_sixteen and much_shared_memory and 64 < head_dim <= 128 else 64
    rows, columns = -(-tokens // tile), -(-head_dim // tile)
    elements = rows * columns * (tile * tile + LOCK)
    if is_sixteen and head_dim > tile:
        splits = max(1, min(rows, SPLITS // (batch * heads)))
        elements += 2 * splits * tile * columns * tile
    return batch * heads * elements


def softmax_backward(
    grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
) -> torch.Tensor:
    """CUDA's gradient of softmax multiplies gradient and output, of any shape, into a tensor of its own."""
    result = output.new_empty(output.shape, dtype=input_dtype)
    product = torch.empty_like(grad)  # noqa: F841
    counted(TRANSCENDENTAL, grad, 0, moved=nbytes(grad) + nbytes(output) + nbytes(result))
    return result


def safe_softmax(scores: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The math kernel's softmax of scores of any shape, which clears rows that are masked everywhere."""
    plain = scores.new_empty(scores.shape, dtype=dtype or scores.dtype)
    masked = scores.new_empty(scores.shape, dtype=torch.bool)  # noqa: F841
    counted(TRANSCENDENTAL, scores, 0, moved=2 * nbytes(scores) + 2 * nbytes(plain))
    return torch.empty_like(plain)


def cuda_attention(longest: int, capability: Capability) -> Callable:
    """A replacement of `scaled_dot_product_attention` that chooses among kernels as a CUDA device does.

    Query is [batch, heads, tokens, head_dim]; key and value may have fewer heads (grouped queries). The
    result has the shape of the query.

    Args:
        longest: tokens of the longest sequence in one call, which sizes the flash kernel's accumulator.
        capability: compute capability of the GPU.
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
        head_dim, value_dim = query.shape[-1], value.shape[-1]
        kernel = choose_kernel(
            capability,
            query.dtype,
            head_dim=head_dim,
            grouped=query.shape[1] != key.shape[1],
            masked=attn_mask is not None or value_dim != head_dim,
            dropout=dropout_p,
        )
        if kernel == "flash":
            return FlashAttention.apply(query, key, value, longest)
        if kernel == "efficient":
            return EfficientAttention.apply(query, key, value, attn_mask, capability)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )

    return attend


def varlen_attention(spec: StepSpec) -> Callable:
    """A replacement of `torch.nn.attention.varlen.varlen_attn` that allocates what its kernel does.

    Also that of FlashAttention's packages. A trace has fewer and longer sequences than the step.
    """
    sequence_tokens = spec.sequence_tokens or spec.longest_sequence
    version = 3 if spec.attention == "flash_attention_3" else 2

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any
    ) -> torch.Tensor:
        return FlashVarlen.apply(query, key, value, sequence_tokens, version)

    return attend


def attention_dropout(config: "PretrainedConfig") -> float:
    """The dropout of attention weights, which architectures call by several names."""
    text = config.get_text_config()
    return max(setting(text, name) or 0.0 for name in DROPOUT_NAMES)


def takes_one_call(config: "PretrainedConfig", spec: StepSpec) -> bool:
    """Whether one call of attention serves all sequences that are joined."""
    text = config.get_text_config()
    head_dim = setting(text, "head_dim") or text.hidden_size // text.num_attention_heads
    is_gpu = spec.joined and spec.device == "cuda" and not has_sinks(config)
    return is_gpu and varlen_supports(
        spec.compute_capability, _dtype(spec), head_dim, attention_dropout(config)
    )


def _dtype(spec: StepSpec) -> torch.dtype:
    """In which attention computes."""
    return getattr(torch, AUTOCAST.get(spec.mixed_precision, spec.dtype))


def attention_sentence(config: "PretrainedConfig", spec: StepSpec) -> str | None:
    """The kernel of attention that a GPU runs, for the plan; None for a CPU, and for masks."""
    if spec.device == "cpu" or spec.attention in ("eager", "sdpa"):
        return None
    calls = "one call for all rows of a micro-batch" if spec.joined else "rows are padded"
    if spec.attention != NAME:
        return f"attention: FlashAttention {spec.attention[-1]}, {calls}"
    if takes_one_call(config, spec):
        return f"attention: PyTorch's flash kernel, {calls}"
    if spec.joined:
        calls = "a call for each row"
    text = config.get_text_config()
    head_dim = setting(text, "head_dim") or text.hidden_size // text.num_attention_heads
    if flash_supports(spec.compute_capability, _dtype(spec), head_dim):
        return f"attention: PyTorch's flash kernel, {calls}"
    return f"attention: PyTorch's memory-efficient kernel with repeated key and value heads, {calls}"
