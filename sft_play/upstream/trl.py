"""What we change in TRL, and take of its private parts."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from types import FunctionType, ModuleType
from typing import Any

from sft_play.upstream.patching import patched


def add_fused_head(model: Any, function: object) -> None:
    """Gives a causal language model TRL's fused output head (since 1.15), which computes with this function.

    `function.apply` takes the arguments of its kernel, with supervised tokens alone on any device. TRL's own
    trainers in this process keep its kernel: the head is made by the same code over other globals. What makes
    this unnecessary: the kernel as an argument of `add_fused_lm_head`.
    """
    add_fused_lm_head = _module_of_head().add_fused_lm_head
    ours = {"_ChunkedLogProbFunction": function, "_use_triton": lambda device: True}
    add = FunctionType(add_fused_lm_head.__code__, {**add_fused_lm_head.__globals__, **ours})
    add(model, temperature=1.0, cast_lm_head_to_fp32=False, outputs=("log_probs", "is_top1"))


@cache
def _module_of_head() -> Any:
    """TRL's module with the head, or a copy of it in which nothing of pandas and datasets is.

    It imports these (1.16) for what the head does not need, which takes half a second of a plan.
    What makes this unnecessary: a module of the head alone.
    """
    from trl import kernels  # noqa: F401 - before it is copied, since others get the packages as they are

    name, unused = "trl.trainer.utils", ("pandas", "datasets")
    if name in sys.modules or any(package in sys.modules for package in unused):
        from trl.trainer import utils

        return utils
    origin, specs = find_spec(name), [find_spec(package) for package in unused]
    assert origin and origin.origin
    spec = spec_from_file_location("trl.trainer.utils_of_head", origin.origin)
    assert spec and spec.loader
    copy = module_from_spec(spec)
    empty = {package: ModuleType(package) for package in unused}
    for package, of_package in zip(empty.values(), specs, strict=True):
        # it annotates functions with their classes
        vars(package).update(__spec__=of_package, __getattr__=lambda _: object)
    with _imported_as(empty):
        spec.loader.exec_module(copy)
    return copy


@contextmanager
def _imported_as(modules: dict[str, Any]) -> Iterator[None]:
    """In the block, who imports these names gets these modules."""
    before = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(before)


@contextmanager
def head_computed_by(
    forward: Callable[..., Any], backward: Callable[..., Any], add_product: Callable[..., Any]
) -> Iterator[None]:
    """In the block, TRL's fused output head calls these functions in the place of its kernels.

    A trace has no GPU that they could run on (1.16). What makes this unnecessary: kernels that are operators
    of PyTorch's, with a fake implementation.
    """
    from trl.kernels import chunked_logprob

    with (
        patched(chunked_logprob, "_forward_tile", forward),
        patched(chunked_logprob, "_backward_tile", backward),
        patched(chunked_logprob, "_addmm_fp32", add_product),
        _imported_as({"trl.trainer.utils": _module_of_head()}),  # by the backward pass
    ):
        yield
