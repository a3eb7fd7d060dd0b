"""What a script or notebook watches a run with: objects of its process, which no other process has."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Listener = Callable[[dict[str, Any]], object]  # of each record of metrics.jsonl, as it is written


@dataclass(frozen=True)
class Hooks:
    """What is called while a run trains in this process."""

    callbacks: tuple[Any, ...] = ()  # transformers.TrainerCallback; they do not see the probe
    progress: Listener | None = None

    def __bool__(self) -> bool:
        return bool(self.callbacks) or self.progress is not None


NO_HOOKS = Hooks()
