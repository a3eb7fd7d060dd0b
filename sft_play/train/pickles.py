"""Pickled files of a checkpoint: only tensors and plain values are loaded, so no code in them can run."""

import os
import pickle
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.serialization import safe_globals
from transformers import trainer_pt_utils

from sft_play.engines.base import Engine
from sft_play.errors import first_line

FORCE, FORBID = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
UNUSED = "training_args.bin"  # of earlier versions; nothing reads it


@contextmanager
def only_tensors(engine: Engine) -> Iterator[None]:
    """Within it `torch.load` refuses other objects, also when a library calls it without asking for that.

    The classes of which the engine's saved optimizer state consists are allowed.
    """
    before = {name: os.environ.pop(name, None) for name in (FORCE, FORBID)}
    os.environ[FORCE] = "1"
    try:
        with ExitStack() as stack:
            stack.enter_context(trainer_pt_utils.safe_globals())  # numpy's, for the state of random numbers
            stack.enter_context(safe_globals(engine.classes_of_state()))
            yield
    finally:
        del os.environ[FORCE]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def load_mapped(path: Path) -> Any:
    """A file of tensors, memory-mapped: only what is used is read."""
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def find_refused(checkpoint: Path, engine: Engine) -> str | None:
    """The first pickled file that would not be loaded, and why; None if all would be."""
    with only_tensors(engine):
        for path in sorted(path for path in checkpoint.rglob("*") if path.suffix in (".pt", ".pth")):
            try:
                load_mapped(path)
            except pickle.UnpicklingError:
                return f"{path.name} holds other objects than tensors, which could run code"
            except (RuntimeError, OSError, EOFError, ValueError) as error:
                return f"{path.name} cannot be read: {first_line(error)}"
    for path in checkpoint.glob("*.bin"):
        if path.name != UNUSED:
            return f"{path.name} is a pickled file, and weights are loaded from safetensors only"
    return None
