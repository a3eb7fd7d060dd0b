"""What DeepSpeed does otherwise than `fully_shard`, whose traced step ZeRO-3's memory is derived from."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from sft_play.sizing.recording.recorder import AllocationRecorder
from sft_play.upstream.patching import patched
from sft_play.upstream.torch import is_view


class KeepingLinear(torch.autograd.Function):
    """The linear layer that DeepSpeed puts in the place of torch's under ZeRO-3 (its zero/linear.py).

    It keeps its input for the gradient of the weight, also where the weight is frozen and gets none.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[..., out] of x [..., in], weight [out, in] and bias [out] or None."""
        ctx.save_for_backward(x, weight, bias)
        if bias is not None and x.dim() == 2:
            return torch.addmm(bias, x, weight.t())
        out = x.matmul(weight.t())
        if bias is not None:
            out += bias
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of those that need one."""
        x, weight, bias = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        x_grad = grad.matmul(weight) if ctx.needs_input_grad[0] else None
        weight_grad = rows.t().matmul(x.reshape(-1, x.shape[-1])) if ctx.needs_input_grad[1] else None
        bias_grad = rows.sum(0) if bias is not None and ctx.needs_input_grad[2] else None
        return x_grad, weight_grad, bias_grad


class _Saved:
    """A view of any shape that is kept for the backward pass, with what it keeps in memory."""

    def __init__(self, view: torch.Tensor) -> None:
        self.view = view
        self.kept: torch.Tensor | None = None


class _KeptViews:
    """Gathered weights of which a view is kept for the backward pass: they stay, and are gathered once more.

    `fully_shard` takes the memory of what it has gathered from all that share it; DeepSpeed lets go of it.
    """

    def __init__(self) -> None:
        self._of_storage: dict[int, WeakSet[_Saved]] = defaultdict(WeakSet)

    def save(self, tensor: torch.Tensor) -> Any:
        """What the graph keeps in the place of a tensor of any shape."""
        if not is_view(tensor):
            return tensor
        saved = _Saved(tensor)
        self._of_storage[tensor.untyped_storage()._cdata].add(saved)
        return saved

    def freed(self, parameter: FSDPParam, free: Callable[[FSDPParam], None]) -> None:
        """Frees a gathered parameter, and takes as much memory for as long as views of it are kept."""
        parts = parameter.all_gather_outputs
        kept = [(part, list(self._of_storage.pop(part.untyped_storage()._cdata, ()))) for part in parts]
        free(parameter)
        for part, views in kept:
            if views:
                stays = torch.empty_like(part)
                for view in views:
                    view.kept = stays


def _saved(kept: Any) -> torch.Tensor:
    return kept.view if isinstance(kept, _Saved) else kept


@contextmanager
def simulate_zero3(recorder: AllocationRecorder) -> Iterator[None]:
    """In the block, `fully_shard` frees buffers that it gathers into at once, and gathers nothing ahead."""
    views, free, gather = _KeptViews(), FSDPParam.free_unsharded_param, FSDPParamGroup.wait_for_unshard

    def freed(parameter: FSDPParam) -> None:
        with recorder.attributing_to("engine"):
            views.freed(parameter, free)

    def gathered(group: FSDPParamGroup) -> None:
        gather(group)
        group.comm_ctx.all_gather_state = None

    with (
        patched(torch.nn.functional, "linear", KeepingLinear.apply),
        patched(FSDPParam, "free_unsharded_param", freed),
        patched(FSDPParamGroup, "wait_for_unshard", gathered),
        patched(FSDPParamGroup, "_backward_prefetch", lambda group: None),
        saved_tensors_hooks(views.save, _saved),
    ):
        yield
