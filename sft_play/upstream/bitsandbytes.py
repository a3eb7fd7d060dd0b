"""What we change in bitsandbytes, and take of its private parts."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

from sft_play.upstream.patching import loaded_within, patched


@contextmanager
def no_overrides() -> Iterator[None]:
    """In the block, no parameter is known to have states in 32 bits beside those in 8, until one is named.

    transformers names embeddings in a table of the process, which holds them for as long as it lives and
    knows them by position, so that those of another run at the same places would have such states too. What
    makes this unnecessary: overrides that belong to an optimizer (0.50 has none).
    """
    from bitsandbytes.optim import GlobalOptimManager

    manager: Any = GlobalOptimManager.get_instance()
    before = dict(vars(manager))
    manager.initialize()
    try:
        yield
    finally:
        vars(manager).update(before)


def forget_overrides() -> None:
    """Empties the table of `no_overrides`."""
    from bitsandbytes.optim import GlobalOptimManager

    manager: Any = GlobalOptimManager.get_instance()
    manager.initialize()


def page_what_is_loaded(optimizer: Any) -> None:
    """Lets a paged optimizer page the states of a checkpoint, as it pages those that it begins with.

    It puts them on the GPU, for good (0.50). What makes this unnecessary: a `load_state_dict` that pages.
    """
    load = optimizer.load_state_dict

    def load_paged(state_dict: Any) -> None:
        load(state_dict, move_to_device=False)
        for weight, state in optimizer.state.items():
            for name in {"state1", "state2"} & state.keys():
                state[name] = optimizer.get_state_buffer(weight, state[name].dtype).copy_(state[name])
        optimizer.to_gpu()  # what is not paged

    optimizer.load_state_dict = load_paged


@contextmanager
def weights_saved_themselves() -> Iterator[None]:
    """In the block, a 4-bit product saves its weight for the backward pass, not a view of it.

    The view would hold what ZeRO-3 has gathered, of all layers, until the update is done (0.50). What makes
    this unnecessary: a product that saves what autograd's own products do.
    """
    import bitsandbytes

    multiply = bitsandbytes.matmul_4bit

    def multiplied(x: Any, weight: Any, **others: Any) -> Any:
        result = multiply(x, weight, **others)
        if hasattr(result.grad_fn, "tensors"):
            result.grad_fn.tensors = None, weight
        return result

    with patched(bitsandbytes, "matmul_4bit", multiplied):
        yield


def compiled_when_called() -> AbstractContextManager[None]:
    """In the block, an import of bitsandbytes, such as PEFT's, does not import PyTorch's compiler.

    That takes a second, for four functions that hardly a run calls. What makes this unnecessary: functions
    that are compiled when they are called (0.50 compiles them when it is imported).
    """

    def change(_: object) -> AbstractContextManager[None]:
        import torch

        return patched(torch, "compile", _when_called)

    return loaded_within("bitsandbytes.backends.default.ops", change)


def _when_called(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """`torch.compile`, when the function is called for the first time."""

    @cache
    def compiled() -> Callable[..., Any]:
        import torch

        return torch.compile(function, **settings)

    return lambda *args, **kwargs: compiled()(*args, **kwargs)
