"""Keeps traced steps on disk, a file for each, so that no step is traced twice."""

import json
import os
import zipfile
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np

from sft_play.sizing.timeline import Segment, StepTrace
from sft_play.sizing.work import Work


def save_trace(path: Path, trace: StepTrace) -> None:
    """Writes a compressed .npz file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.npz")
    arrays: dict[str, Any] = {n: value for n, value in vars(trace).items() if isinstance(value, np.ndarray)}
    work = {f"work.{name}": value for name, value in vars(trace.work).items()}
    segments = json.dumps([astuple(segment) for segment in trace.segments])
    np.savez_compressed(temporary, **arrays, **work, segments=segments, stand_ins=trace.stand_ins)
    temporary.replace(path)


def load_trace(path: Path) -> StepTrace | None:
    """The trace in a file; None if it is damaged."""
    try:
        with np.load(path) as file:
            arrays = {name: array if array.ndim else array.item() for name, array in file.items()}
        work = {name[5:]: arrays.pop(name) for name in list(arrays) if name.startswith("work.")}
        segments = tuple(Segment(*parts) for parts in json.loads(arrays.pop("segments")))
        stand_ins = tuple(arrays.pop("stand_ins").tolist())
        return StepTrace(**arrays, segments=segments, stand_ins=stand_ins, work=Work(**work))
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile):
        return None
