"""FSDP1, with which the published sharded steps were trained: torch's own, on fake tensors.

FSDP1 flattens the parameters of each unit into one, `FlatParameter`, and frees and resizes its storage.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit
from peft.utils.other import fsdp_auto_wrap_policy
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.checkpoint import checkpoint

from benchmarks.evidence.runs import Run
from sft_play.model.architecture.shape import decoder_layers
from sft_play.sizing.recording.recorder import AllocationRecorder
from sft_play.sizing.trace import fake_model
from sft_play.sizing.trace.sharded import quant_tensors, silent_group
from sft_play.units import AUTOCAST
from sft_play.upstream.patching import patched


def divided(model: torch.nn.Module, run: Run) -> FullyShardedDataParallel:
    """A model of fake tensors, divided as accelerate 1.0 and PEFT divide it: by decoder layer and adapter."""
    layer = type(decoder_layers(model)[2][0])
    by_layer = partial(transformer_auto_wrap_policy, transformer_layer_cls={layer})
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=by_layer if run.mode == "full" else fsdp_auto_wrap_policy(model),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        mixed_precision=None if run.autocast == "no" else _in_16_bit(getattr(torch, AUTOCAST[run.autocast])),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )


def _in_16_bit(dtype: torch.dtype) -> MixedPrecision:
    return MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype)


@contextmanager
def loaded(model: Any, run: Run, recorder: AllocationRecorder) -> Iterator[FullyShardedDataParallel]:
    """The model divided; its meta tensors become fake ones, of which the first process has its part."""
    with silent_group(run.processes):
        fake_model.materialise(model, torch.nn.ModuleList(), AllocationRecorder())
        _store_as(getattr(torch, run.dtype), model)
        recorder.begin("load")
        with recorder, watched(recorder):
            result = divided(model, run)
        for unit in _layer_units(result) if run.checkpointing else ():
            _checkpoint(unit, reentrant=run.reentrant)
        scales = (quant_tensors(getattr(module, "quant_state", None)) for module in model.modules())
        for tensor in chain(model.buffers(), *scales):  # which every process has whole
            recorder.add(tensor, "weights")
        recorder.retag(recorder.blocks_alive(), "weights")
        yield result


def _store_as(dtype: torch.dtype, model: torch.nn.Module) -> None:
    """Lets packed weights be tensors of this type, as many bytes: a unit of FSDP1 has one type."""
    for module in model.modules():
        if isinstance(module, Linear4bit):
            elements = module.weight.nbytes // dtype.itemsize
            module._parameters["weight"] = torch.nn.Parameter(
                torch.empty((elements, 1), dtype=dtype), requires_grad=False
            )


def _layer_units(model: FullyShardedDataParallel) -> list[Any]:
    layers = set(decoder_layers(model.module)[2])
    return [unit for unit in FullyShardedDataParallel.fsdp_modules(model) if unit in layers]


def _checkpoint(unit: Any, *, reentrant: bool) -> None:
    """Lets a unit be recomputed with FSDP1's part of it, as before transformers 5.

    FSDP1 hooks onto the inputs of a frozen unit to learn when to let its weights go. Until the backward pass
    ends, the hooks keep the inputs of recomputed units alive, and their gradients.
    """
    forward = unit.forward

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(forward, **kwargs), *args, use_reentrant=reentrant)

    unit.forward = recomputed


def forget_gradients(model: FullyShardedDataParallel) -> None:
    """Frees the gradients, which FSDP1 does when the next forward pass begins."""
    model.zero_grad()
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        if unit._handle is not None:
            unit._handle.flat_param.grad = None


@contextmanager
def watched(recorder: AllocationRecorder) -> Iterator[None]:
    """Records the storages that FSDP1 resizes."""
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        resize(storage, size)
        recorder.resized(storage)
        return storage

    with patched(torch.UntypedStorage, "resize_", resized):
        yield
