"""What we change in bitsandbytes, and take of its private parts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
