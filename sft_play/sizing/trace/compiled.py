"""Compiled layers in a trace: they allocate by the code that the compiler generates for them.

The code around the kernels decides what is allocated, kept and freed. It is generated as in a run, and called
with tensors of the trace; its kernels do nothing.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any

import torch

from sft_play.model.attention import operator
from sft_play.model.attention.operator import Rows, attend_rows, gradients_of_rows
from sft_play.model.attention.varlen import offsets_of
from sft_play.model.layers import compilation
from sft_play.sizing.kernels.attention import joined_workspace
from sft_play.sizing.kernels.simulation import SymbolicRecorder
from sft_play.sizing.step import StepSpec
from sft_play.upstream.patching import patched
from sft_play.upstream.torch import IN_GIVEN_ORDER, joined_attention_backward, without_kernels


@cache
def generating(architecture: str, device: str) -> Callable[[FunctionType], Callable[..., Any]]:
    """A compiler for the traces of an architecture, which generates code once for all those of a device.

    That of a GPU allocates as its own does, in the order that its runs have.
    """
    options = IN_GIVEN_ORDER if device == "cpu" else None

    def generated(function: FunctionType) -> Callable[..., Any]:
        code = function.__code__.replace()  # with which its graphs are kept, apart from those of runs
        own = FunctionType(code, function.__globals__, None, function.__defaults__, function.__closure__)
        own.__kwdefaults__ = function.__kwdefaults__
        # what earlier traces had otherwise, as the rank of adapters, is a constant in a run
        return torch.compile(own, backend=without_kernels, options=options, dynamic=False)

    return generated


@contextmanager
def joined_in_graphs(recorder: SymbolicRecorder, spec: StepSpec) -> Iterator[None]:
    """Within it, attention over joined rows allocates in compiled layers as its kernels do.

    A CPU's operator gets offsets as a tensor, which has no values here.
    """
    offsets = [0]

    def rows_of(lengths: tuple[int, ...], device: torch.device) -> Rows:
        offsets[:] = itertools.accumulate(lengths, initial=0)
        with recorder.silent():  # a few bytes, which all layers share
            return Rows(lengths, device)

    def forward(query: Any, key: Any, value: Any, _: object, *options: Any) -> Any:
        return attend_rows(query, key, value, offsets, *options)

    def backward(
        grad: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, _: object, *rest: Any
    ) -> Any:
        return gradients_of_rows(grad, query, key, value, out, sums, offsets, *rest)

    operators = torch.ops.sft_play
    recorder.kernel_models[operators.attend_joined.default] = forward
    recorder.kernel_models[operators.attend_joined_backward.default] = backward
    recorder.inside[joined_attention_backward()] = joined_workspace(spec)
    made_anew = offsets_of.__wrapped__  # what is kept is for runs, too
    on_cpu = _never if recorder.cuda else operator.on_cpu
    with (
        patched(compilation, "rows_of", rows_of),
        patched(operator, "offsets_of", made_anew),
        patched(operator, "on_cpu", on_cpu),
    ):
        yield


def _never(tensor: torch.Tensor) -> bool:
    """As `on_cpu`, of tensors of any shape that stand for those of a GPU."""
    return False
