"""Every kind of attention that a run may have and every kernel that a GPU runs for it, with all their facts.

A new one is a row here, with a function for its workspace. Sources: PyTorch's flash_api.cpp, sdp_utils.cpp,
attention_backward.cu and mem_eff_attention/kernel_backward.h, and FlashAttention's hopper/flash_api.cpp.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from sft_play.choices.kernels import Capability, Span, within
from sft_play.units import BYTES_PER_ELEMENT, SIXTEEN_BIT

NAME = "varlen_sdpa"

FIRST, LAST = (5, 0), (99, 0)
FLASH_GPUS = (((8, 0), (12, 2)),)
LITTLE_SHARED_MEMORY = (((8, 6), (8, 10)), ((12, 0), (12, 2)))  # for the flash kernel
MUCH_SHARED_MEMORY = (((8, 0), (8, 6)), ((9, 0), (12, 0)))
LARGE_TILES = (((8, 0), (8, 1)), ((8, 7), (8, 8)), ((9, 0), (12, 0)))  # of the memory-efficient kernel
ROW_PRODUCTS = (((7, 5), LAST),)  # the memory-efficient kernel multiplies gradient and output itself

FLASH3_WIDTHS = 64, 96, 128, 192, 256  # head sizes that FlashAttention 3 computes with
FLASH_ROWS = 128  # the flash kernel rounds sequence lengths up to a multiple of this
SPLITS = 200  # the memory-efficient kernel splits the keys of all heads into at most so many parts
LOCK = 4  # 32-bit words of a lock in front of each tile of its accumulator


@dataclass(frozen=True)
class Call:
    """What the memory of one call of a kernel depends on."""

    batch: int
    heads: int
    key_heads: int  # of key and value: fewer with grouped queries
    tokens: int
    head_dim: int
    dtype: str
    capability: Capability
    longest: int  # tokens of the longest sequence
    sequence_tokens: int  # of an average sequence, where several are joined

    @property
    def grouped(self) -> bool:
        """Whether key and value have fewer heads than the query."""
        return self.key_heads != self.heads


@dataclass(frozen=True)
class Inputs:
    """Inputs that a kernel can train on."""

    gpus: tuple[Span, ...]
    types: tuple[str, ...]
    head_sizes: range
    dropout: bool = True


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel of GPUs: what it takes, and the bytes that it allocates."""

    label: str
    inputs: tuple[Inputs, ...]
    groups: bool = False  # key and value may have fewer heads than the query
    masks: bool = False
    kept: Callable[[Call], list[int]]  # blocks for the backward pass besides inputs, output and mask
    workspace: Callable[[Call], list[int]]  # blocks of the backward pass besides the gradients
    row_products: Callable[[Call], bool] = lambda call: True  # of gradient and output, computed within

    def takes(
        self,
        capability: Capability,
        dtype: str,
        head_dim: int,
        *,
        grouped: bool = False,
        masked: bool = False,
        dropout: float = 0.0,
    ) -> bool:
        """Whether it can train on such inputs: `grouped` if key and value have fewer heads than the query."""
        if (grouped and not self.groups) or (masked and not self.masks):
            return False
        return any(
            within(capability, known.gpus)
            and dtype in known.types
            and head_dim in known.head_sizes
            and (known.dropout or not dropout)
            for known in self.inputs
        )


def _fp32(*elements: int) -> list[int]:
    """The bytes of blocks in fp32."""
    return [4 * count for count in elements]


def _flash_width(head_dim: int) -> int:
    """The head size that the flash kernel computes with."""
    return -(-head_dim // 32) * 32 if head_dim <= 128 else -(-head_dim // 64) * 64


def _flash_kept(call: Call) -> list[int]:
    """The log-sum-exp of each row, and the seed."""
    return [*_fp32(call.batch * call.heads * call.tokens), 16]


def _head_gradients(call: Call) -> list[int]:
    """Grouped queries have gradients of key and value for each query head, which are summed afterwards."""
    size = call.batch * call.tokens * call.heads * call.head_dim * BYTES_PER_ELEMENT[call.dtype]
    return [size, size] if call.grouped else []


def _flash_workspace(call: Call) -> list[int]:
    """Row products and an accumulator for the query's gradient, of the longest sequence."""
    rows = call.batch * call.heads * -(-min(call.tokens, call.longest) // FLASH_ROWS) * FLASH_ROWS
    return [*_fp32(rows, rows * _flash_width(call.head_dim)), *_head_gradients(call)]


def _joined_workspace(call: Call) -> list[int]:
    """The same for joined sequences, which are a tile of rows apart."""
    rows = call.heads * (call.tokens + round(FLASH_ROWS * call.tokens / call.sequence_tokens))
    return [*_fp32(rows, rows * _flash_width(call.head_dim)), *_head_gradients(call)]


def _flash3_workspace(call: Call) -> list[int]:
    """As FlashAttention 3 has it on compute capability 9.0."""
    width = next(size for size in FLASH3_WIDTHS if call.head_dim <= size)
    tile, key_tile = 128 if width <= 64 else 64, {192: 96, 256: 80}.get(width, 128)
    rows, key_rows = (
        call.tokens + round(size * call.tokens / call.sequence_tokens) for size in (tile, key_tile)
    )
    blocks = _fp32(call.heads * rows, call.heads * rows, call.heads * rows * width)
    return blocks + (_fp32(call.key_heads * key_rows * width) * 2 if call.grouped else [])


def _efficient_row_products(call: Call) -> bool:
    return call.dtype in SIXTEEN_BIT and (within(call.capability, ROW_PRODUCTS) or call.head_dim <= 64)


def _efficient_workspace(call: Call) -> list[int]:
    """Row products if the kernel computes them, and accumulators.

    Gradients of the query are summed up in tiles. Those of key and value are too if they do not fit into
    registers: in fp32 they go straight to the result, in 16 bit they fit for as many columns as a tile has.
    Tiles are 64 x 64, or 128 x 128 where the shared memory of a GPU holds those for heads of 65 to 128.
    """
    is_sixteen, all_heads = call.dtype in SIXTEEN_BIT, call.batch * call.heads
    tile = 128 if is_sixteen and within(call.capability, LARGE_TILES) and 64 < call.head_dim <= 128 else 64
    rows, columns = -(-call.tokens // tile), -(-call.head_dim // tile)
    elements = rows * columns * (tile * tile + LOCK)
    if is_sixteen and call.head_dim > tile:
        splits = max(1, min(rows, SPLITS // all_heads))
        elements += 2 * splits * tile * columns * tile
    products = [all_heads * call.tokens] if _efficient_row_products(call) else []
    return _fp32(*products, all_heads * elements)


# PyTorch's flash kernel for sequences that are joined; unlike the next one, it pads no heads
JOINED = Kernel(
    label="PyTorch's flash kernel",
    inputs=(
        Inputs(FLASH_GPUS, SIXTEEN_BIT, range(8, 193, 8), dropout=False),
        Inputs(MUCH_SHARED_MEMORY, SIXTEEN_BIT, range(8, 257, 8), dropout=False),
        Inputs(LITTLE_SHARED_MEMORY, SIXTEEN_BIT, range(232, 257, 8), dropout=False),
    ),
    groups=True,
    kept=_flash_kept,
    workspace=_joined_workspace,
)
FLASH2 = replace(JOINED, label="FlashAttention 2")
FLASH3 = replace(JOINED, label="FlashAttention 3", workspace=_flash3_workspace)
FLASH = Kernel(
    label="PyTorch's flash kernel",
    inputs=(
        Inputs(FLASH_GPUS, SIXTEEN_BIT, range(1, 193)),
        Inputs(MUCH_SHARED_MEMORY, SIXTEEN_BIT, range(1, 257)),
        Inputs(LITTLE_SHARED_MEMORY, SIXTEEN_BIT, range(225, 257), dropout=False),
    ),
    groups=True,
    kept=_flash_kept,
    workspace=_flash_workspace,
)
EFFICIENT = Kernel(
    label="PyTorch's memory-efficient kernel with repeated key and value heads",
    inputs=(
        Inputs(((FIRST, (12, 2)),), ("float16",), range(8, 65537, 8)),
        Inputs((((8, 0), (12, 2)),), ("bfloat16",), range(8, 65537, 8)),
        Inputs((((8, 0), (12, 2)),), ("float32",), range(4, 65537, 4)),
        Inputs(((FIRST, (8, 0)),), ("float32",), range(1, 65537)),
    ),
    masks=True,
    kept=lambda call: _fp32(call.batch * call.heads * -(-call.tokens // 32) * 32),
    workspace=_efficient_workspace,
    row_products=_efficient_row_products,
)
# PyTorch's kernels for one sequence, in its order of choice. Where none takes a call, its math kernel writes
# all scores to memory. cuDNN's is turned off (`sft_play.model.attention.varlen.register`).
FUSED = (FLASH, EFFICIENT)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """What `model.attention` may be: how it takes rows, and the kernel for joined ones."""

    boundaries: Literal["lengths", "offsets"] | None = None  # how it is told where joined rows begin
    joined: Kernel = JOINED
    windows: bool = False  # a sliding window needs no mask
    dropout: bool = True
    gpus: tuple[Span, ...] = ()  # that a package is made for; the others run on all devices
    preferred: tuple[Span, ...] = ()  # GPUs for which `auto` takes the package, where ours does not do
    modules: tuple[str, ...] = ()  # Python modules that bring the package
    available: str = ""  # the function of transformers.utils.import_utils that looks for the package

    @property
    def is_package(self) -> bool:
        """Whether it has to be installed in addition to PyTorch."""
        return bool(self.modules)


# Packages last, the newest at the end.
ATTENTIONS = {
    NAME: Attention(boundaries="lengths"),
    "sdpa": Attention(),
    "eager": Attention(),
    "flash_attention_2": Attention(
        boundaries="offsets",
        joined=FLASH2,
        windows=True,
        gpus=(((8, 0), (13, 0)),),
        preferred=(((8, 0), (13, 0)),),
        modules=("flash_attn",),
        available="is_flash_attn_2_available",
    ),
    "flash_attention_3": Attention(
        boundaries="offsets",
        joined=FLASH3,
        windows=True,
        dropout=False,
        gpus=(((8, 0), (10, 0)),),
        preferred=(((9, 0), (10, 0)),),
        modules=("flash_attn_interface", "kernels"),  # the latter gets it from the Hub
        available="is_flash_attn_3_available",
    ),
}


def fused_kernel(capability: Capability, dtype: str, head_dim: int, **call: Any) -> Kernel | None:
    """The kernel that PyTorch trains with for one sequence (`Kernel.takes`); None for its math kernel."""
    return next((kernel for kernel in FUSED if kernel.takes(capability, dtype, head_dim, **call)), None)


@cache
def same_kernels(capability: Capability) -> Capability:
    """The lowest compute capability with the same kernels and allocations: steps are traced once for all."""
    facts = {known.gpus for kernel in (JOINED, *FUSED) for known in kernel.inputs}
    facts |= {LARGE_TILES, ROW_PRODUCTS}
    edges = sorted({edge for spans in facts for span in spans for edge in span})

    def answers(gpu: Capability) -> list[bool]:
        return [within(gpu, spans) for spans in facts]

    return next((edge for edge in edges if answers(edge) == answers(capability)), capability)
