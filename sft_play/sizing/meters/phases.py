"""Measures the peak memory of each phase of real steps: on a GPU from its allocator's statistics."""

import gc
from collections.abc import Callable
from typing import Self

import torch

from sft_play.sizing.meters.cpu import CpuMeter


class PhaseMeter:
    """A context that measures the phases named by `begin`, at first `load`; results exist at its end."""

    def __init__(self, device: torch.device, model: torch.nn.Module) -> None:
        self.peaks: dict[str, int] | None = (
            None  # bytes, with what was there before; None on a CPU without an anchor
        )
        self.reserved_bytes: int | None = None  # the most that the GPU's allocator reserved
        self.retries = 0  # how often the device was full, so that the allocator had to free cached blocks
        self._meter = CudaMeter(device) if device.type == "cuda" else CpuMeter(model)
        self.begin: Callable[[str], None] = self._meter.begin  # attributes memory to a phase from here on
        self.anchor: Callable[[], None] = self._meter.anchor  # to be called between backward pass and update

    def __enter__(self) -> Self:
        gc.collect()  # so that earlier garbage is not freed within the context
        self._meter.start()
        self.begin("load")
        return self

    def __exit__(self, *error: object) -> None:
        self.peaks, self.reserved_bytes, self.retries = self._meter.stop()


class CudaMeter:
    """The peak of each phase, from the statistics of the CUDA allocator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peaks: dict[str, int] = {}
        self.reserved = 0
        self.phase: str | None = None

    def start(self) -> None:
        """Resets the statistics."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        self.retries_before = self._retries()

    def _retries(self) -> int:
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0))

    def begin(self, phase: str | None) -> None:
        """Attributes peaks to this phase from here on; None ends the last phase."""
        if self.phase is not None:
            peak = torch.cuda.max_memory_allocated(self.device)
            self.peaks[self.phase] = max(peak, self.peaks.get(self.phase, 0))
            self.reserved = max(self.reserved, torch.cuda.max_memory_reserved(self.device))
        torch.cuda.reset_peak_memory_stats(self.device)
        self.phase = phase

    def anchor(self) -> None:
        """Nothing: the allocator knows what is alive."""

    def stop(self) -> tuple[dict[str, int], int, int]:
        """Peaks by phase, the most that was reserved, and how often cached blocks had to be freed."""
        self.begin(None)
        return self.peaks, self.reserved, self._retries() - self.retries_before
