"""Traces in files of the cache."""

import json
from dataclasses import astuple
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np

from sft_play.cache import read_bytes, write_bytes
from sft_play.timeline import Segment, StepTrace
from sft_play.work import Work


def save_trace(path: Path, trace: StepTrace) -> None:
    """Keeps a trace in the cache, as a compressed .npz file."""
    arrays: dict[str, Any] = {n: value for n, value in vars(trace).items() if isinstance(value, np.ndarray)}
    work = {f"work.{name}": value for name, value in vars(trace.work).items()}
    segments = json.dumps([astuple(segment) for segment in trace.segments])
    content = BytesIO()
    in_ram = np.array(trace.in_ram, dtype=np.int64)
    everything = arrays | work | dict(segments=segments, stand_ins=trace.stand_ins, in_ram=in_ram)
    with ZipFile(content, "w", ZIP_DEFLATED, compresslevel=1) as file:  # numpy's level takes thrice as long
        for name, value in everything.items():
            with file.open(f"{name}.npy", "w") as part:
                np.lib.format.write_array(part, np.asanyarray(value))
    write_bytes(path, content.getvalue())


def load_trace(path: Path) -> StepTrace | None:
    """The trace in a file of the cache; None if it is damaged."""
    content = read_bytes(path)
    if content is None:
        return None
    with np.load(BytesIO(content)) as file:
        arrays = {name: array if array.ndim else array.item() for name, array in file.items()}
    work = {name[5:]: arrays.pop(name) for name in list(arrays) if name.startswith("work.")}
    segments = tuple(Segment(*parts) for parts in json.loads(arrays.pop("segments")))
    stand_ins, in_ram = (tuple(arrays.pop(name).tolist()) for name in ("stand_ins", "in_ram"))
    return StepTrace(**arrays, segments=segments, stand_ins=stand_ins, work=Work(**work), in_ram=in_ram)
