"""What we change in accelerate, and take of its private parts."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sft_play.upstream.patching import patched

if TYPE_CHECKING:
    from transformers import TrainingArguments

# CUDA's libraries, NCCL and Triton take memory besides PyTorch's allocator, each with words of its own.
FULL = re.compile("out of memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that a GPU or the machine has no memory left.

    accelerate knows the sentences of PyTorch's allocators only (1.15). What makes this unnecessary: one that
    knows those of CUDA's libraries.
    """
    import torch
    from accelerate.utils.memory import should_reduce_batch_size

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    known = isinstance(error, RuntimeError) and FULL.search(str(error))
    return bool(known) or (isinstance(error, Exception) and should_reduce_batch_size(error))


def let_old_drivers_train() -> None:
    """Turns off in NCCL what several RTX 40 cannot do with a driver before 550, as `accelerate launch` does.

    Without these variables, accelerate refuses such a machine (1.15), also for one process. What makes this
    unnecessary: 550 as the oldest driver of PyTorch's builds.
    """
    from accelerate.utils import check_cuda_p2p_ib_support

    if not check_cuda_p2p_ib_support():
        os.environ.setdefault("NCCL_P2P_DISABLE", "1")
        os.environ.setdefault("NCCL_IB_DISABLE", "1")


def forget_state() -> None:
    """Lets accelerate find out anew which processes there are, and with what precision they compute.

    It has no public way (1.15). What makes this unnecessary: the same as for `state_of_a_run`.
    """
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


@contextmanager
def state_of_a_run() -> Iterator[None]:
    """After the block, accelerate's state is as before it.

    It is one for the process (1.15): an `Accelerator` of the user's own would be refused where its precision
    differs. What makes this unnecessary: a state that belongs to an `Accelerator`.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState

    kept: list[tuple[Any, dict[str, Any]]] = [
        (kind, dict(kind._shared_state)) for kind in (PartialState, AcceleratorState, GradientState)
    ]
    try:
        yield
    finally:
        for kind, before in kept:
            kind._shared_state.clear()
            kind._shared_state.update(before)


def without_number(args: "TrainingArguments") -> None:
    """Gives the CPU of several processes no number, so that batches stay where they are.

    accelerate calls it "cpu:0" (1.15), and torch copies each tensor that is moved there, since its own device
    is "cpu". What makes this unnecessary: an accelerate that does not.
    """
    import torch

    if args.device.type == "cpu":
        args.distributed_state.device = args._setup_devices = torch.device("cpu")


def place_of_forward(module: object) -> str:
    """The attribute with the function by which a module computes, also where accelerate's hook is around it.

    The hook calls what it found (1.15). What makes this unnecessary: a public name for that.
    """
    return "_old_forward" if hasattr(module, "_hf_hook") else "forward"


# What `Accelerator.prepare` leaves on a model.
_WRAPPING = ("forward", "_original_forward", "_is_accelerate_prepared")


@contextmanager
def wrapped_as_before(model: object) -> Iterator[None]:
    """After the block, a model is wrapped by accelerate as before it, or not at all.

    What makes this unnecessary: an `unwrap_model` that leaves nothing (1.15).
    """
    before = {name: vars(model)[name] for name in _WRAPPING if name in vars(model)}
    try:
        yield
    finally:
        for name in _WRAPPING:
            vars(model).pop(name, None)
        vars(model).update(before)


@contextmanager
def unwrapped(accelerator: Any) -> Iterator[None]:
    """In the block, `accelerator.prepare` leaves a model as it is: it is divided already.

    transformers 5.23 has a word for such models, which 5.17 does not know: there, accelerate puts DDP around
    them. What makes this unnecessary: to support no transformers without it, if it is for models like ours.
    """
    prepare = accelerator.prepare_model

    def as_it_is(model: object, **_: object) -> Any:
        return prepare(model, device_placement=False, evaluation_mode=True)

    with patched(accelerator, "prepare_model", as_it_is):
        yield
