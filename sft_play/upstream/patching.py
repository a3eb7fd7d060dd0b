"""How this room changes a library: for a block, or until the command that needs the change is over."""

import atexit
import builtins
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from sft_play.errors import ConfigError
from sft_play.spelling import make

# The blocks of `undone` that are open, the innermost last, each with what lasts until its end. The first one
# is the process, which a command ends with.
_OPEN: list[tuple[ExitStack, set[Any]]] = [(ExitStack(), set())]


@contextmanager
def undone() -> Iterator[None]:
    """After the block, libraries are as they were before it: what `lasting` has begun there is undone."""
    with ExitStack() as stack:
        _OPEN.append((stack, set()))
        try:
            yield
        finally:
            _OPEN.pop()


def lasting(change: Callable[..., AbstractContextManager[Any]], *args: object) -> None:
    """Enters `change(*args)` until the innermost block of `undone` ends, unless the same lasts already.

    For what several share, none of whom can end it.
    """
    if not any((change, *args) in known for _, known in _OPEN):
        stack, known = _OPEN[-1]
        if len(_OPEN) == 1 and not known:
            atexit.register(stack.close)  # while what it puts back is still there
        stack.enter_context(change(*args))
        known.add((change, *args))


def lasts_to_the_end() -> bool:
    """Whether what `lasting` begins now is there until the process ends, as in a command."""
    return len(_OPEN) == 1


@contextmanager
def patched(target: Any, name: str, value: object, *, builtin: bool = False) -> Iterator[None]:
    """In the block, `target.name`, or with `builtin` one of Python's own names there, is `value`.

    Raises:
        ConfigError: there is no such name, so the patch would have no effect.
    """
    if not hasattr(builtins if builtin else target, name):
        raise ConfigError(
            f"{target.__name__} has no {name}, which SFT-Play replaces: this version of the library is not "
            f"supported; run `{make('install')}` for one that is"
        )
    missing = object()
    before = vars(target).get(name, missing)
    setattr(target, name, value)
    try:
        yield
    finally:
        delattr(target, name) if before is missing else setattr(target, name, before)


@contextmanager
def loaded_within(name: str, change: Callable[[ModuleType], AbstractContextManager[None]]) -> Iterator[None]:
    """In the block, an import of the module of this name executes it within `change` of the module."""
    finder: Any = _Finder(name, change)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder:
    """Finds one module, for `loaded_within`."""

    def __init__(self, name: str, change: Callable[[ModuleType], AbstractContextManager[None]]) -> None:
        self.name, self.change = name, change

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == self.name else None
        loader: Any = spec and spec.loader
        if loader:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                with self.change(module):
                    execute(module)

            loader.exec_module = exec_module
        return spec
