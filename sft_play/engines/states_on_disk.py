"""AdamW's moments in mapped files, so that RAM need not hold them: the system reads and writes them.

With the weights in RAM it is the CPU that updates them, and it takes mapped memory like any other, so nothing
else changes: what is learned, checkpoints, and how a run is resumed. A file has no name once it is mapped;
the system removes it when the process has ended, however it ends.
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
    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
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
        part = part_of(moment)
        if part.nbytes:
            part.set_(self._file(part.nbytes), 0, part.shape, part.stride())
        return moment

    def _file(self, size: int) -> torch.UntypedStorage:
        path = self.folder / f"sft-play-states-{uuid4().hex}"
        try:
            with path.open("xb") as file:
                # or a full disk would end the process by a signal, when a page is written
                os.posix_fallocate(file.fileno(), 0, size)
            storage: Any = torch.UntypedStorage.from_file(str(path), True, size)
        except OSError as error:
            raise StorageError(
                f"parallel.nvme_path={self.folder} has no room for {format_bytes(size)} of the optimizer's "
                f"states: {error.strerror}. Free space, or set parallel.nvme_path to a folder on another disk"
            ) from error
        finally:
            path.unlink(missing_ok=True)
        return storage  # type: ignore[no-any-return]


def moment_like(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.Tensor:
    """Zeros of a parameter's shape and division, where its optimizer keeps moments: in RAM, or mapped."""
    make = vars(optimizer).get("moment_like", torch.zeros_like)
    return make(parameter)  # type: ignore[no-any-return]
