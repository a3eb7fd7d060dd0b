"""Which tiles of the output head are traced, and what each of them stands for."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import linear

from sft_play.sizing.kernels.simulation import SymbolicRecorder
from sft_play.upstream.patching import patched


@contextmanager
def few_tiles(recorder: SymbolicRecorder) -> Iterator[None]:
    """Traces few of the tiles that the output head loops over: they are alike, and a peak needs only some.

    TRL's head has tiles of tokens x vocabulary, ours of tokens. Of more than two, a full one at each end is
    traced, since sizes have to be linear in the tokens; of the vocabulary, and under a CPU's autocast, which
    keeps a cast of each tile, the first two and the last. The recorder is told what each stands for.
    """
    from trl.kernels import chunked_logprob

    from sft_play.model.layers import cpu

    def few(start: int, stop: int, step: int) -> Iterator[int]:
        everything = range(start, stop, step)
        linear_size = recorder.cuda or not torch.is_autocast_enabled("cpu")
        if len(everything) > 2 and step in (chunked_logprob.TOKEN_CHUNK_SIZE, cpu.TILE) and linear_size:
            chosen = dict.fromkeys((start, stop - step), (stop - start) / (2 * step))
        else:
            chosen = {everything[place]: 1.0 for place in (0, 1, -1)[: len(everything)]}
            if len(everything) > 3:
                chosen[everything[1]] = len(everything) - 2.0
        for begin, times in chosen.items():
            with recorder.standing_for(times):
                yield begin

    leaf = cpu._leaf

    def kept(tensor: torch.Tensor, requires_grad: bool) -> Any:
        """The leaf; autocast keeps a cast of each until it ends, also of those that this one stands for."""
        found = leaf(tensor, requires_grad)
        others = round((recorder.times - 1) * len(tensor)) if recorder.times > 1 and requires_grad else 0
        if others and torch.is_autocast_enabled("cpu"):
            alike = tensor.detach().as_strided((others, tensor.shape[1]), tensor.stride(), 0)
            with recorder.standing_for(0.0), torch.enable_grad():
                linear(leaf(alike, requires_grad), tensor.new_empty(1, tensor.shape[1]))
        return found

    with patched(chunked_logprob, "range", few, builtin=True), patched(cpu, "range", few, builtin=True):
        with patched(cpu, "_leaf", kept):
            yield
