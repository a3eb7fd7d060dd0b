"""What we change in bitsandbytes, and take of its private parts."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

from sft_play.upstream.patching import patched

COMPILED = "bitsandbytes.backends.default.ops"


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


@contextmanager
def compiled_when_called() -> Iterator[None]:
    """In the block, an import of bitsandbytes, such as PEFT's, does not import PyTorch's compiler.

    That takes a second, for four functions that hardly a run calls. What makes this unnecessary: functions
    that are compiled when they are called (0.50 compiles them when it is imported).
    """
    sys.meta_path.insert(0, _Loader)
    try:
        yield
    finally:
        sys.meta_path.remove(_Loader)


class _Loader(SourceFileLoader):
    """Finds and loads the module of these functions, and no other."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == COMPILED else None
        if spec and spec.origin:
            spec.loader = cls(name, spec.origin)
        return spec

    def exec_module(self, module: ModuleType) -> None:
        import torch

        with patched(torch, "compile", _when_called):
            super().exec_module(module)


def _when_called(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """`torch.compile`, when the function is called for the first time."""

    @cache
    def compiled() -> Callable[..., Any]:
        import torch

        return torch.compile(function, **settings)

    return lambda *args, **kwargs: compiled()(*args, **kwargs)
