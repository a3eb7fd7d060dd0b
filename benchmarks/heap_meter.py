"""heap_meter.c: compiled, and in a process that was started with it."""

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

SOURCE = Path(__file__).with_name("heap_meter.c")
SETTLE_S, SETTLED_BYTES, LONGEST_S = 0.001, 1024, 10.0


def built_meter(folder: Path) -> Path:
    """The compiled meter.

    Raises:
        SystemExit: there is no compiler.
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise SystemExit("the memory meter has to be compiled, and there is no gcc: install one")
    library = folder / "heap_meter.so"
    subprocess.run(
        [compiler, "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl", "-lpthread"], check=True
    )
    return library


def loaded_meter() -> ctypes.CDLL:
    """The meter of this process, which counts from now on."""
    meter = ctypes.CDLL(os.environ["LD_PRELOAD"])
    for name in ("meter_live", "meter_peak", "meter_peak_with_scratch"):
        getattr(meter, name).restype = ctypes.c_int64
    meter.meter_start()
    return meter


def wait_for_gloo(meter: ctypes.CDLL) -> None:
    """Lets the collectives of this process return only when gloo's threads hold nothing of them."""
    for kind in (DefaultAllGather, DefaultReduceScatter):
        kind.__call__ = _settled(kind.__call__, meter)  # type: ignore[method-assign]
    for name in ("all_reduce", "all_to_all_single"):
        setattr(distributed, name, _settled(getattr(distributed, name), meter))


def _settled(communicate: Callable[..., None], meter: ctypes.CDLL) -> Callable[..., None]:
    """The same, until gloo's threads have let go of the tensors and freed their copies.

    That may take long on a busy machine.
    """

    def call(*args: Any, **named: Any) -> None:
        tensors = [value for value in (*args, *named.values()) if isinstance(value, torch.Tensor)]
        storages = [tensor.untyped_storage()._cdata for tensor in tensors]

        def users() -> list[int]:
            counts = list(map(torch._C._storage_Use_Count, storages))
            return counts + [tensor._use_count() for tensor in tensors]  # type: ignore[attr-defined]

        before = users()
        live, latest = meter.meter_live() + SETTLED_BYTES, time.monotonic() + LONGEST_S
        communicate(*args, **named)
        while time.monotonic() < latest and (
            meter.meter_live() > live or any(now > then for now, then in zip(users(), before, strict=True))
        ):
            time.sleep(SETTLE_S)

    return call
