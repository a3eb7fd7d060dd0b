"""What only training on a CPU needs: an output head, and a heap that keeps its memory.

The output head works in tiles. TRL's does so too, but its kernel is made for GPUs. On a CPU it goes over
each tile a dozen times, scores tokens that carry no loss, and computes everything again in the backward
pass, which takes four times as long as full logits. Here PyTorch's cross entropy scores a tile of
supervised tokens and its gradient is taken at once, while the tile is in the cache. Nothing is computed
twice, and one tile of logits is alive.
"""

import ctypes
import sys
from typing import Any

import torch
from torch.nn.functional import cross_entropy, linear

from sft_play.errors import ConfigError
from sft_play.spelling import make

TILE = 256  # tokens; larger tiles are no faster and take more memory
PARTS = 32  # of the head's gradient in 16 bits, each of which is copied in fp32 while it is added

# parameters of mallopt(3)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MOST_KEPT = 2**31 - 1  # bytes of free memory at the top of the heap; an int is all that mallopt takes
LARGEST_ON_HEAP = 32 << 20  # glibc's own maximum


def keep_freed_memory() -> None:
    """Keeps memory that a micro-batch frees for the next one.

    glibc returns what exceeds 64 MiB to the operating system, which clears each page when it is used again:
    as often as there are micro-batches, and the more, the larger they are. Other C libraries are left alone.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(M_TRIM_THRESHOLD, MOST_KEPT)
        library.mallopt(M_MMAP_THRESHOLD, LARGEST_ON_HEAP)


class TiledLogProbs(torch.autograd.Function):
    """Log-probabilities of targets under `hidden @ weight.T`, without the [tokens, vocabulary] logits.

    Gradients are those of the sum of the log-probabilities, times a factor: a loss that weighs some tokens
    more than others cannot be trained with it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None,
        logit_scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[torch.Tensor | None, ...]:
        """Scores the tokens and takes the gradients; the arguments are those of TRL's kernel.

        hidden is [tokens, hidden_size], weight [vocabulary, hidden_size], bias [vocabulary] or None, targets
        [tokens]. "is_top1" in `outputs` asks whether each target ranks first; only without gradients.

        Returns:
            log-probabilities [tokens] in fp32, three times None for statistics that nobody asks for, and
            whether each target ranks first, [tokens], or None.
        """
        needed = ctx.needs_input_grad[:3]
        head = [_leaf(p, wanted) for p, wanted in zip((weight, bias), needed[1:], strict=True)]
        hidden_grad = torch.empty_like(hidden) if needed[0] else None
        trained = [p is not None and p.requires_grad for p in head]
        head_grads = [
            torch.zeros_like(p, dtype=torch.float32) if learns else None
            for p, learns in zip(head, trained, strict=True)
        ]
        log_probs = hidden.new_empty(len(targets), dtype=torch.float32)
        ranks_first = None
        if "is_top1" in outputs and not any(needed):
            ranks_first = torch.empty_like(targets, dtype=torch.bool)
        for start in range(0, len(targets), TILE):
            tile = slice(start, start + TILE)
            with torch.set_grad_enabled(any(needed)):
                tokens = _leaf(hidden[tile], needed[0])
                logits = _scaled(linear(tokens, *head), logit_scale, softcap, temperature)
                scores = -cross_entropy(logits, targets[tile], reduction="none")
                leaves = [p for p in (tokens, *head) if p is not None and p.requires_grad]
                grads = list(torch.autograd.grad(scores.sum(), leaves)) if leaves else []
            log_probs[tile] = scores.detach()
            if ranks_first is not None:
                ranks_first[tile] = logits.argmax(-1) == targets[tile]
            if hidden_grad is not None:
                hidden_grad[tile] = grads.pop(0)
            for total in head_grads:
                if total is not None:
                    _add_to(total, grads.pop(0))
        ctx.save_for_backward(hidden_grad, *head_grads)
        ctx.dtype = weight.dtype
        return log_probs, None, None, None, ranks_first

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, *_: object) -> tuple[torch.Tensor | None, ...]:
        """The gradients of `forward` times the gradient of the log-probabilities, [tokens]."""
        hidden_grad, *head_grads = ctx.saved_tensors
        if grad is None:
            return (None,) * 9
        found = [None if hidden_grad is None else hidden_grad.mul_(grad[:, None])]
        factor = grad[:1].sum()  # the same for all tokens; 0 where there are none
        found += [None if total is None else total.mul_(factor).to(ctx.dtype) for total in head_grads]
        return *found, *(None,) * 6


def _add_to(total: torch.Tensor, grad: torch.Tensor) -> None:
    """Adds a gradient in place, of any shape, part by part: PyTorch copies 16-bit operands of fp32 sums."""
    parts = 1 if grad.dtype == total.dtype else PARTS
    for part, added in zip(total.chunk(parts), grad.chunk(parts), strict=True):
        part += added


def _leaf(tensor: torch.Tensor | None, requires_grad: bool) -> Any:
    """The tensor, of any shape, apart from the graph."""
    return None if tensor is None else tensor.detach().requires_grad_(requires_grad)


def _scaled(logits: torch.Tensor, scale: float, softcap: float | None, temperature: float) -> torch.Tensor:
    """The logits [tokens, vocabulary] in fp32 as the model defines them."""
    logits = logits.float()
    if scale != 1:
        logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits if temperature == 1 else logits / temperature


def keep_differentiable(model: torch.nn.Module) -> None:
    """Stops bitsandbytes from repacking 4-bit weights at the first evaluation, as on AVX-512 BF16 CPUs.

    The product with repacked weights has no gradient, so training after an evaluation would continue without
    those layers.

    Raises:
        ConfigError: bitsandbytes no longer has this switch.
    """
    bitsandbytes: Any = sys.modules.get("bitsandbytes")  # already imported if there are 4-bit layers
    for module in model.modules() if bitsandbytes else ():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            if not hasattr(module, "support_avx512bf16_for_cpu"):
                raise ConfigError(
                    "tuning.mode=qlora: 4-bit layers have no support_avx512bf16_for_cpu, so this version of "
                    f"bitsandbytes is not supported: run `{make('install')}`"
                )
            module.support_avx512bf16_for_cpu = False
