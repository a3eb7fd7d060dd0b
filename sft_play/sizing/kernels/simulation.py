"""What the target device's kernels allocate, for a step that is traced on fake CPU tensors.

A trace runs on fake CPU tensors because that needs no GPU. Two things would make it wrong:

1. A fake tensor shows the result of an operation, not the workspace that its kernel allocates inside. Where
   that workspace is large (attention, 4-bit products, the loss), the operation is replaced by a stand-in that
   allocates the same tensors as the kernel and computes nothing.
2. Libraries check the device and take another path on a CPU: other attention kernels, other autocast dtypes,
   another loss. Within `simulate_cuda` these checks have the same results as on a GPU.

Only differences that cost memory are modeled. Sources: PyTorch's flash_api.cpp and sdp_utils.cpp
(attention), autocast_mode.h (types), SoftMax.cu and SoftMax.cpp, TRL's kernels/chunked_logprob.py (loss),
bitsandbytes' backends (4-bit products).
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import product
from typing import Any

import torch

from sft_play.choices.kernels import LAYERS, Capability
from sft_play.model.attention.varlen import type_name
from sft_play.model.layers.stand_in import counted
from sft_play.sizing.kernels.attention import cuda_attention, safe_softmax, softmax_backward
from sft_play.sizing.kernels.cpu import four_bit_product, inside_kernels
from sft_play.sizing.meters.product_scratch import Rules
from sft_play.sizing.recording.operations import nbytes
from sft_play.sizing.recording.recorder import AllocationRecorder
from sft_play.units import SIXTEEN_BIT
from sft_play.upstream.patching import patched
from sft_play.upstream.trl import head_computed_by
from sft_play.work import ELEMENTWISE, IN_PLACE, PRODUCT, UNPACK

# CUDA autocast casts the inputs of the first group to fp32, and only the result of the second one; CPU
# autocast does neither.
FP32_INPUT = frozenset([
    "layer_norm", "native_layer_norm", "group_norm", "norm", "pow", "__pow__", "__rpow__", "exp", "expm1",
    "log", "log10", "log1p", "log2", "reciprocal", "rsqrt", "acos", "asin", "cosh", "sinh", "tan", "erfinv",
    "softplus", "cross_entropy", "nll_loss", "logsumexp", "cosine_similarity", "cdist", "dist", "mse_loss",
    "l1_loss",
])  # fmt: skip
FP32_RESULT = frozenset(["softmax", "log_softmax", "sum", "cumsum", "prod", "cumprod"])
DROPOUT = frozenset(["dropout", "dropout_"])
CHANGED = FP32_INPUT | FP32_RESULT | DROPOUT  # what `cuda_autocast` replaces


class SymbolicRecorder(AllocationRecorder):
    """A recorder for fake tensors that also knows the workspaces of kernels (`kernel_models`)."""

    def __init__(
        self,
        *,
        cuda: bool,
        supervised: int,
        eval_supervised: int,
        autocast: str | None = None,
        threads: int = 1,
        scratch: Rules = (),
    ) -> None:
        """Models a GPU's kernels or those of a CPU's threads, for so many tokens with a loss in each phase.

        `autocast` is the type around the step, by its name in torch, which operations cannot see, `scratch`
        what a CPU's products take.
        """
        from bitsandbytes.backends.cpu import ops as cpu_kernels

        super().__init__()
        self.cuda = cuda
        self._supervised = supervised, eval_supervised
        self._autocast = getattr(torch, autocast) if autocast else None
        ops, four_bit = torch.ops.aten, torch.ops.bitsandbytes
        self.kernel_models: dict[Any, Callable] = {
            four_bit.gemm_4bit.default: self.four_bit_product,
            ops._grouped_mm.default: _grouped_product,
            ops.index.Tensor: self._rows_of_mask,
            ops._index_put_impl_.default: self._put_rows_of_mask,
            ops.index_put.default: self._gradient_of_rows_of_mask,
            ops.masked_select.default: lambda tensor, mask: tensor.new_empty(self.supervised),
        }
        for name in ("optimizer_update_32bit", "optimizer_update_8bit_blockwise"):
            # on a CPU a function in Python, on a GPU one kernel
            update = _noop if cuda else getattr(cpu_kernels, f"_{name}_cpu")
            self.kernel_models[getattr(four_bit, name).default] = update
        self._scratch = scratch
        self.inside = {} if cuda else inside_kernels(threads, scratch)
        if cuda:
            self.kernel_models |= {
                ops._softmax_backward_data.default: softmax_backward,
                ops._safe_softmax.default: safe_softmax,
            }

    @property
    def supervised(self) -> int:
        """Tokens of the batch that contribute to the loss."""
        return self._supervised[self.phase == "evaluation"]

    def run(self, func: Any, types: object, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs the operation, or the model of its kernel, and records the results."""
        kernel_model = self.kernel_models.get(func)
        if kernel_model is not None:
            with self:
                out = kernel_model(*args, **kwargs)
            if out is not NotImplemented:
                self.record(out)
                return out
        if func in self.inside:
            with self:
                blocks = self.inside[func](*args)  # noqa: F841 - live until this returns
        return super().run(func, types, args, kwargs)

    def four_bit_product(
        self, a: Any, b: object, shape: Sequence[int], absmax: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Dequantizes scales and weights, then multiplies; the fused kernel for few tokens needs less.

        From [..., in_features] to [..., out_features], which `shape` has. The scales are quantized themselves
        if there are `absmax_8bit`, or the fourth of `args`.
        """
        if not self.cuda:
            nested = kwargs.get("absmax_8bit", (*args, *(None,) * 4)[3]) is not None
            return four_bit_product(a, shape, nested=nested, autocast=self._autocast, scratch=self._scratch)
        scales = kwargs.get("absmax_8bit")
        if scales is not None:
            plain = torch.empty(scales.shape, dtype=torch.float32)
            absmax = plain + 0  # noqa: F841
        weights = shape[0] * shape[1]
        counted(UNPACK, a, weights, moved=weights * (0.5 + a.dtype.itemsize))
        counted(PRODUCT, a, a.numel() // a.shape[-1], shape[0], a.shape[-1])
        unpacked = torch.empty(tuple(shape), dtype=a.dtype)  # noqa: F841
        return a.new_empty((*a.shape[:-1], shape[0]))

    def _is_mask(self, indices: Sequence[Any]) -> bool:
        return len(indices) == 1 and indices[0] is not None and indices[0].dtype == torch.bool

    def _rows_of_mask(self, tensor: torch.Tensor, indices: Sequence[Any]) -> Any:
        """`tensor[mask]`, for [batch, tokens, ...] and a mask [batch, tokens]: [supervised, ...].

        How many rows a mask selects depends on data, which fake tensors do not have; the step says how many
        tokens are supervised.
        """
        if not self._is_mask(indices):
            return NotImplemented
        positions = torch.empty((self.supervised, indices[0].dim()), dtype=torch.int64)  # noqa: F841
        found = tensor.new_empty((self.supervised, *tensor.shape[indices[0].dim() :]))
        counted(ELEMENTWISE, tensor, 0, moved=2 * nbytes(found))
        return found

    def _put_rows_of_mask(
        self, tensor: torch.Tensor, indices: Sequence[Any], values: torch.Tensor, *args: object
    ) -> Any:
        """`tensor[mask] = values`, for which a GPU sorts the indices; returns `tensor` itself."""
        if not self._is_mask(indices):
            return NotImplemented
        if self.cuda:
            sort_buffers = torch.empty((4, self.supervised), dtype=torch.int64)  # noqa: F841
        else:
            positions = torch.empty((self.supervised, indices[0].dim()), dtype=torch.int64)  # noqa: F841
        counted(IN_PLACE, tensor, 0, moved=3 * nbytes(values))
        return tensor

    def _gradient_of_rows_of_mask(
        self, zeros: torch.Tensor, indices: Sequence[Any], values: torch.Tensor, *args: object
    ) -> Any:
        """The gradient of `tensor[mask]`; real zeros are filled in place, fake ones would be copied."""
        if self.phase != "backward":
            return NotImplemented
        return self._put_rows_of_mask(zeros, indices, values)


def _grouped_product(
    a: torch.Tensor, b: torch.Tensor, offs: Any = None, *args: object, **kwargs: object
) -> torch.Tensor:
    """Products of groups of rows with one expert each, in any dtype; PyTorch's fake kernel only has bf16.

    Shapes, with G groups that end at the rows `offs` [G]: [tokens, K] x [G, K, N] -> [tokens, N] in the
    forward pass, [M, tokens] x [tokens, N] -> [G, M, N] for weight gradients, and
    [G, M, K] x [G, K, N] -> [G, M, N].
    """
    if a.dim() == 2 and b.dim() == 2:
        shape: tuple[int, ...] = (len(offs), a.shape[0], b.shape[1])
    elif a.dim() == 3 and b.dim() == 3:
        shape = (a.shape[0], a.shape[1], b.shape[2])
    else:
        shape = (a.shape[-2], b.shape[-1])
    out = a.new_empty(shape)
    counted(
        PRODUCT, a, out.numel() // b.shape[-1], b.shape[-1], a.shape[-1], nbytes(a) + nbytes(b) + nbytes(out)
    )
    return out


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Gives CPU tensors under autocast the dtypes that CUDA autocast would give them.

    Each function is replaced: a mode that sees all functions would see each look at a tensor too, which took
    a tenth of a trace.
    """
    with ExitStack() as stack:
        for owner, name in product((torch, torch.nn.functional, torch.Tensor), CHANGED):
            if hasattr(owner, name):
                stack.enter_context(patched(owner, name, _on_cuda(getattr(owner, name), name)))
        yield


def _on_cuda(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function of this name, whose arguments are cast as CUDA's autocast does."""
    if name in DROPOUT:
        return _cuda_dropout
    takes_float = name in FP32_INPUT

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            if takes_float:
                args = tuple(map(_as_float, args))
                kwargs = {name: _as_float(value) for name, value in kwargs.items()}
            elif kwargs.get("dtype") is None and _is_sixteen_bit(args):
                kwargs = {**kwargs, "dtype": torch.float32}
        is_half = bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float16
        if name == "softmax" and is_half and kwargs.get("dtype") is torch.float32:
            dim = kwargs.get("dim", args[-1])  # its second argument, if it is not named
            return torch._softmax(args[0], dim, True)  # reads fp16; bf16 is copied to fp32 first
        return function(*args, **kwargs)

    return call


def _is_sixteen_bit(args: Sequence[Any]) -> bool:
    return bool(args) and isinstance(args[0], torch.Tensor) and type_name(args[0].dtype) in SIXTEEN_BIT


def _as_float(value: Any) -> Any:
    return value.float() if _is_sixteen_bit((value,)) else value


def _cuda_dropout(*args: Any, **kwargs: Any) -> Any:
    """Dropout that keeps a mask of one byte per element, as on CUDA."""
    bound = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
    tensor, p, training = bound["input"], bound.get("p", 0.5), bound.get("training", bound.get("train", True))
    if not training or p == 0:
        return tensor
    return torch.native_dropout(tensor, p, True)[0]


def _noop(*args: object, **kwargs: object) -> None:
    """Replaces an in-place kernel, which allocates nothing."""


def _forward_tile(tile: torch.Tensor, *args: object, **kwargs: object) -> None:
    """One kernel that reads the tile, [tokens, vocabulary]."""
    counted(ELEMENTWISE, tile, 0, moved=nbytes(tile))


def _backward_tile(tile: torch.Tensor, *args: object, **kwargs: object) -> None:
    """One kernel that turns the tile, [tokens, vocabulary], into gradients in place."""
    counted(IN_PLACE, tile, 0, moved=2 * nbytes(tile))


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """One kernel that adds a product of [m, k] and [k, n] to fp32 sums of [m, n]."""
    counted(PRODUCT, a, a.shape[0], b.shape[1], a.shape[1], moved=2 * nbytes(total))


@contextmanager
def simulate_cuda(
    longest: int, capability: Capability, *, windows: bool, joined: Callable | None = None
) -> Iterator[None]:
    """Makes library code behave as it would with CUDA tensors.

    Args:
        longest: tokens of the longest sequence that attention sees.
        capability: compute capability of the GPU.
        windows: whether attention needs no mask for a sliding window.
        joined: stands for the kernel that serves joined sequences in one call; None if there are none.
    """
    from sft_play.model.attention import varlen
    from sft_play.model.layers import loss_head
    from sft_play.model.layers.own_passes import code_of

    autocast_enabled, attend = torch.is_autocast_enabled, varlen._attend

    def attend_without_window(query: Any, key: Any, value: Any, window: int | None, **options: Any) -> Any:
        return attend(query, key, value, None, **options)

    replacements: list[tuple[Any, str, Any]] = [
        (varlen, "scaled_dot_product_attention", cuda_attention(longest, capability)),
        (varlen, "varlen_attn", joined),
        (varlen, "offsets_of", lambda lengths, device: None),
        (varlen, "device_capability", lambda device: capability),
        *((code, *item) for code in map(code_of, LAYERS) for item in code.STAND_INS.items()),
        (loss_head, "is_on_cpu", lambda tensor: False),
        # PEFT asks without naming a device, which means CUDA.
        (torch, "is_autocast_enabled", lambda *device: autocast_enabled(*(device or ("cpu",)))),
    ]
    if windows:
        replacements.append((varlen, "_attend", attend_without_window))
    with ExitStack() as stack:
        for target, name, replacement in replacements:
            stack.enter_context(patched(target, name, replacement))
        stack.enter_context(head_computed_by(_forward_tile, _backward_tile, _add_product))
        stack.enter_context(cuda_autocast())
        yield


@contextmanager
def simulate_cpu() -> Iterator[None]:
    """Makes the random state that checkpointing saves per layer a fake tensor, so that it is traced."""
    size = torch.get_rng_state().numel()
    with patched(torch, "get_rng_state", lambda: torch.empty(size, dtype=torch.uint8)):
        with patched(torch, "set_rng_state", _noop):
            yield


@contextmanager
def attributed_loss(recorder: AllocationRecorder) -> Iterator[None]:
    """Attributes what the output head allocates, forward and backward, to the loss."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    from sft_play.model.layers.cpu import TiledLogProbs

    def attributed(function: Callable) -> staticmethod:
        def call(*args: object, **kwargs: object) -> Any:
            with recorder.attributing_to("loss"):
                return function(*args, **kwargs)

        return staticmethod(call)

    with ExitStack() as stack:
        for head, name in product((ChunkedLogProbFunction, TiledLogProbs), ("forward", "backward")):
            function = inspect.unwrap(getattr(head, name))
            stack.enter_context(patched(head, name, attributed(function)))
        yield
