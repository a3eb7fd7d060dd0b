"""What the kernels of the device that is costed allocate, for a step that is traced on fake CPU tensors.

Fake tensors show the results of operations, not what a kernel allocates inside, and those of a CPU take the CPU's turns where
libraries ask for the device. Here are the differences that cost memory. Sources: PyTorch's flash_api.cpp and sdp_utils.cpp
(attention), autocast_mode.h (types), TRL's kernels/chunked_logprob.py (loss), bitsandbytes' backends (4-bit products).
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from sft_play.sizing.ledger import Ledger

# Operations that CUDA's autocast computes in fp32, and those whose result alone it makes fp32; the CPU's leaves them all be.
FP32_INPUT = frozenset(
    [
        *(
            "layer_norm",
            "native_layer_norm",
            "group_norm",
            "norm",
            "pow",
            "__pow__",
            "__rpow__",
            "exp",
            "expm1",
            "log",
            "log10",
        ),
        *("log1p", "log2", "reciprocal", "rsqrt", "acos", "asin", "cosh", "sinh", "tan", "erfinv", "softplus", "cross_entropy"),
        *("nll_loss", "logsumexp", "cosine_similarity", "cdist", "dist", "mse_loss", "l1_loss"),
    ]
)
FP32_RESULT = frozenset(["softmax", "log_softmax", "sum", "cumsum", "prod", "cumprod"])
SIXTEEN_BIT = (torch.bfloat16, torch.float16)
FLASH_HEAD_DIM = 256  # the largest that the flash kernel takes
FLASH_ROWS = 128  # it rounds lengths up to this


class SymbolicLedger(Ledger):
    """A ledger for fake tensors: operations whose kernels allocate more than their result are spelled out."""

    def __init__(self, *, cuda: bool, supervised: int, eval_supervised: int):
        super().__init__()
        self.cuda = cuda
        self._supervised = supervised, eval_supervised
        ops, four_bit = torch.ops.aten, torch.ops.bitsandbytes
        self.spelled_out: dict[Any, Callable] = {
            four_bit.gemm_4bit.default: self._four_bit_product,
            ops._grouped_mm.default: _grouped_product,
        }
        if cuda:
            self.spelled_out |= {
                ops.index.Tensor: self._rows_of_mask,
                ops._index_put_impl_.default: self._put_rows_of_mask,
                ops.masked_select.default: lambda tensor, mask: tensor.new_empty(self.supervised),
            }

    @property
    def supervised(self) -> int:
        """Positions of the batch that carry loss."""
        return self._supervised[self.phase == "evaluation"]

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Runs the operation, or what its kernel does, and writes down the results."""
        spelled_out = self.spelled_out.get(func)
        if spelled_out is not None:
            with self:
                out = spelled_out(*args, **(kwargs or {}))
            if out is not NotImplemented:
                self.record(out)
                return out
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _four_bit_product(self, a: Any, b: Any, shape: Sequence[int], absmax: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Dequantises scales and weights, then multiplies; the fused kernel for few tokens would do without."""
        scales = kwargs.get("absmax_8bit")
        if scales is not None:
            plain = torch.empty(scales.shape, dtype=torch.float32)
            absmax = plain + 0  # noqa: F841
            if not self.cuda:
                del plain
        kept = [torch.empty(tuple(shape), dtype=a.dtype)]
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else a.dtype
        if dtype != a.dtype:  # autocast reaches the product inside
            kept += [torch.empty(tuple(shape), dtype=dtype), torch.empty(a.shape, dtype=dtype)]
        return a.new_empty((*a.shape[:-1], shape[0]), dtype=dtype)

    def _is_mask(self, indices: Sequence[Any]) -> bool:
        return len(indices) == 1 and indices[0] is not None and indices[0].dtype == torch.bool

    def _rows_of_mask(self, tensor: torch.Tensor, indices: Sequence[Any]) -> Any:
        """`tensor[mask]`: how many rows depends on data, which fake tensors lack; the step says how many are supervised."""
        if not self._is_mask(indices):
            return NotImplemented
        positions = torch.empty((self.supervised, indices[0].dim()), dtype=torch.int64)  # noqa: F841
        return tensor.new_empty((self.supervised, *tensor.shape[indices[0].dim() :]))

    def _put_rows_of_mask(self, tensor: torch.Tensor, indices: Sequence[Any], values: torch.Tensor, *args: Any) -> Any:
        if not self._is_mask(indices):
            return NotImplemented
        order = torch.empty((4, self.supervised), dtype=torch.int64)  # noqa: F841  the sort that makes it deterministic
        return tensor


def _grouped_product(a: torch.Tensor, b: torch.Tensor, offs: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Products of groups of rows with an expert's matrix each, in any type: the fake kernel knows bf16 alone."""
    if a.dim() == 2 and b.dim() == 2:
        shape: tuple[int, ...] = (len(offs), a.shape[0], b.shape[1])
    elif a.dim() == 3 and b.dim() == 3:
        shape = (a.shape[0], a.shape[1], b.shape[2])
    else:
        shape = (a.shape[-2], b.shape[-1])
    return a.new_empty(shape)


class CudaAutocast(TorchFunctionMode):
    """Under autocast, types as CUDA has them on CPU tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Casts what CUDA would cast; also dropout, whose CUDA kernel keeps a mask of one byte an element."""
        kwargs = kwargs or {}
        if func is torch.Tensor.backward:  # called as it is, it would run with this mode off, and so would recomputed layers
            with self:
                return _run_backward(args[0])
        name = getattr(func, "__name__", "")
        if name in ("dropout", "dropout_") and "Module" not in str(func):
            return _cuda_dropout(func, *args, **kwargs)
        if torch.is_autocast_enabled("cpu"):
            if name in FP32_INPUT:
                args, kwargs = [_as_float(a) for a in args], {key: _as_float(a) for key, a in kwargs.items()}
            elif name in FP32_RESULT and kwargs.get("dtype") is None and _is_sixteen_bit(args):
                kwargs = {**kwargs, "dtype": torch.float32}
        return func(*args, **kwargs)


def _run_backward(loss: torch.Tensor) -> None:
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _is_sixteen_bit(args: Sequence[Any]) -> bool:
    return bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype in SIXTEEN_BIT


def _as_float(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in SIXTEEN_BIT else value


def _cuda_dropout(func: Any, *args: Any, **kwargs: Any) -> Any:
    bound = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
    tensor, p, training = bound["input"], bound.get("p", 0.5), bound.get("training", bound.get("train", True))
    if not training or p == 0:
        return tensor
    return torch.native_dropout(tensor, p, True)[0]


class FlashAttention(torch.autograd.Function):
    """What PyTorch's flash kernel allocates and keeps; it computes nothing. [batch, heads, tokens, head_dim]."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, longest: int) -> torch.Tensor:
        """Keeps inputs, output and one number a row."""
        batch, heads, tokens, _ = query.shape
        out = query.new_empty((batch, tokens, heads, value.shape[-1])).transpose(1, 2)
        log_sum = query.new_empty((batch, heads, tokens), dtype=torch.float32)
        seed = torch.empty(2, dtype=torch.int64)
        ctx.longest = longest
        ctx.save_for_backward(query, key, value, out, log_sum, seed)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Allocates gradients, and sums in fp32."""
        query, key, value, out, _, _ = ctx.saved_tensors
        batch, heads, tokens, head_dim = query.shape
        rounded = -(-min(tokens, ctx.longest) // FLASH_ROWS) * FLASH_ROWS
        width = -(-head_dim // 32) * 32 if head_dim <= 128 else -(-head_dim // 64) * 64
        d_query, d_key, d_value = (
            t.new_empty((t.shape[0], t.shape[2], t.shape[1], t.shape[3])).transpose(1, 2) for t in (query, key, value)
        )
        # A name keeps each alive as long as the kernel does.
        d_softmax = query.new_empty((batch, heads, rounded), dtype=torch.float32)  # noqa: F841
        accumulator = query.new_empty((batch, rounded, heads, width), dtype=torch.float32)  # noqa: F841
        if key.shape[1] != heads:  # grouped queries: each head's gradient first, then their sum
            expanded = [query.new_empty((batch, tokens, heads, t.shape[-1])) for t in (key, value)]  # noqa: F841
        return d_query, d_key, d_value, None


class EfficientAttention(torch.autograd.Function):
    """What the memory-efficient kernel allocates with a mask: a bias in the type of the query, fp32 sums in the backward."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Keeps inputs, output, one number a row and the bias."""
        batch, heads, tokens, _ = query.shape
        bias = query.new_empty((*mask.shape[:-1], -(-mask.shape[-1] // 16) * 16))
        out = query.new_empty((batch, tokens, heads, value.shape[-1])).transpose(1, 2)
        log_sum = query.new_empty((batch, heads, -(-tokens // 32) * 32), dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, log_sum, bias)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Allocates gradients, and sums in fp32."""
        query, key, value, out, log_sum, _ = ctx.saved_tensors
        delta = torch.empty_like(log_sum)  # noqa: F841
        sums = query.new_empty(query.shape, dtype=torch.float32)  # noqa: F841
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def cuda_attention(longest: int) -> Callable:
    """PyTorch's attention with the kernel choice of a CUDA device; the CPU's function for what only the plain kernel can do.

    Args:
        longest: tokens of the longest sequence that one call sees, which sizes the kernel's accumulator.
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
        sixteen, head_dim = query.dtype in SIXTEEN_BIT, query.shape[-1]
        if attn_mask is None and sixteen and head_dim <= FLASH_HEAD_DIM and value.shape[-1] == head_dim:
            return FlashAttention.apply(query, key, value, longest)
        if query.shape[1] == key.shape[1]:
            if attn_mask is None:
                return FlashAttention.apply(query, key, value, longest)  # the efficient kernel, whose sums are alike
            return EfficientAttention.apply(query, key, value, attn_mask)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # grouped queries with a mask, or in fp32
            return scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
            )

    return attend


@contextmanager
def swapped(target: Any, name: str, value: Any) -> Iterator[None]:
    """Within, `target.name` is `value`."""
    missing = object()
    before = vars(target).get(name, missing)
    setattr(target, name, value)
    try:
        yield
    finally:
        delattr(target, name) if before is missing else setattr(target, name, before)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """A kernel that works in place."""


@contextmanager
def few_tiles() -> Iterator[None]:
    """TRL's loss works through tiles of tokens x vocabulary that are all alike: two each way cost what all would.

    Tiles of tokens are taken from both ends, so that they are full ones; of the vocabulary the first two, and the last
    (a smaller one).
    """
    from trl.kernels import chunked_logprob

    def two(start: int, stop: int, step: int) -> Sequence[int]:
        everything = range(start, stop, step)
        if step == chunked_logprob.TOKEN_CHUNK_SIZE:
            return everything if len(everything) == 1 else (start, stop - step)
        return everything if len(everything) <= 3 else (*everything[:2], everything[-1])

    with swapped(chunked_logprob, "range", two):
        yield


@contextmanager
def as_on_cuda(longest: int, *, flash: bool) -> Iterator[None]:
    """Within, library code behaves as it would with CUDA tensors; `flash` is the package, which has windows built in."""
    import trl.trainer.utils
    from trl.kernels import chunked_logprob

    from sft_play import attention

    autocast_enabled, attend = torch.is_autocast_enabled, attention._attend
    with ExitStack() as stack:
        if flash:
            stack.enter_context(
                swapped(attention, "_attend", lambda q, k, v, window, **options: attend(q, k, v, None, **options))
            )
        for target, name, replacement in (
            (attention, "scaled_dot_product_attention", cuda_attention(longest)),
            (trl.trainer.utils, "_use_triton", lambda device: True),  # scores supervised positions only
            (chunked_logprob, "_forward_tile", _nothing),
            (chunked_logprob, "_backward_tile", _nothing),
            (chunked_logprob, "_addmm_fp32", _nothing),
            # PEFT asks without naming a device, which means CUDA
            (torch, "is_autocast_enabled", lambda *device: autocast_enabled(*(device or ("cpu",)))),
        ):
            stack.enter_context(swapped(target, name, replacement))
        stack.enter_context(CudaAutocast())
        yield


@contextmanager
def as_on_cpu() -> Iterator[None]:
    """Within, checkpointing keeps the CPU's random state for each layer as a tensor that is counted."""
    size = torch.get_rng_state().numel()
    with swapped(torch, "get_rng_state", lambda: torch.empty(size, dtype=torch.uint8)):
        with swapped(torch, "set_rng_state", _nothing):
            yield


@contextmanager
def watched_loss(ledger: Ledger) -> Iterator[None]:
    """Books what TRL's fused output head allocates, forward and backward, as loss."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction as Head

    def watched(function: Callable) -> staticmethod:
        def call(*args: Any, **kwargs: Any) -> Any:
            with ledger.inside_loss_head():
                return function(*args, **kwargs)

        return staticmethod(call)

    with ExitStack() as stack:
        for name in ("forward", "backward"):
            stack.enter_context(swapped(Head, name, watched(inspect.unwrap(getattr(Head, name)))))
        yield
