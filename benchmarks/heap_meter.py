"""heap_meter.c: compiled, and in a process that was started with it."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("heap_meter.c")


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
