"""Tensors in mapped files, so that RAM need not hold them: the system reads and writes them.

They are AdamW's moments, which the CPU updates where weights are in RAM, and it takes mapped memory like any
other, so nothing else changes: what is learned, checkpoints, and how a run is resumed. Under ZeRO-3, weights
are so too. A file has no name once it is mapped; the system removes it when the process has ended,
however it ends.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from sft_play.engines.state import MOMENTS
from sft_play.engines.stored import part_of
from sft_play.errors import StorageError
from sft_play.units import format_bytes


@dataclass(frozen=True)
class StatesOnDisk:
    """Makes the states of an optimizer, where they do not exist, before each of its steps."""

    folder: Path

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes the states now, except for weights that DeepSpeed will update in vectors of its own.

        Whoever sets the states of these makes the moments by `moment_like`.
        """
        vars(optimizer)["moment_like"] = self._mapped_like
        self(optimizer)
        optimizer.register_step_pre_hook(self)

    @torch.no_grad()
    def __call__(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """As torch's AdamW makes them, but mapped.

        Raises:
            StorageError: the disk has no room for them.
        """
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not (optimizer.state.get(parameter) or hasattr(parameter, "ds_tensor")):
                    moments = {key: self._mapped_like(parameter) for key in MOMENTS}
                    step = torch.zeros((), dtype=torch.float32)
                    optimizer.state[parameter] = {"step": step, **moments}

    def _mapped_like(self, parameter: torch.Tensor) -> torch.Tensor:
        """Zeros of a parameter's shape and division."""
        moment = torch.empty_like(parameter)
        put_on_disk(part_of(moment), self.folder)
        return moment


def put_on_disk(tensor: torch.Tensor, folder: Path) -> torch.Tensor:
    """Gives a tensor of any shape zeros in a mapped file in this folder, in place, and returns it.

    Raises:
        StorageError: the disk has no room for it.
    """
    if not tensor.nbytes:
        return tensor
    path = folder / f"sft-play-{uuid4().hex}"
    try:
        with path.open("xb") as file:
            # or a full disk would end the process by a signal, when a page is written
            os.posix_fallocate(file.fileno(), 0, tensor.nbytes)
        storage: Any = torch.UntypedStorage.from_file(str(path), True, tensor.nbytes)
    except OSError as error:
        raise StorageError(
            f"parallel.nvme_path={folder} has no room for {format_bytes(tensor.nbytes)} that would be in RAM "
            f"otherwise: {error.strerror}. Free space, or set parallel.nvme_path to a folder on another disk"
        ) from error
    finally:
        path.unlink(missing_ok=True)
    return tensor.set_(storage, 0, tensor.shape, tensor.stride())


def moment_like(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.Tensor:
    """Zeros of a parameter's shape and division, where its optimizer keeps moments: in RAM, or mapped."""
    make = vars(optimizer).get("moment_like", torch.zeros_like)
    return make(parameter)  # type: ignore[no-any-return]
