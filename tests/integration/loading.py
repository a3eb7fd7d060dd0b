"""A model that a rank loads and divides, with the memory that this took."""

import ctypes
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from sft_play.engines.stored import give_back_freed_memory
from sft_play.job import Job
from sft_play.model.build import build_model
from sft_play.model.layers.cpu import M_MMAP_THRESHOLD
from sft_play.model.weights.finished import release_memory
from sft_play.train import session
from sft_play.train.memory_meter import MemoryMeter
from sft_play.units import KIB
from tests.plans import plan_with


def anonymous_bytes() -> int:
    """What this process has allocated and touched; pages of mapped files do not count."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * KIB


@contextmanager
def anonymous_peak() -> Iterator[list[int]]:
    """The most bytes that this process grows by in the block, as the only element when it has ended."""
    before, done, seen, found = anonymous_bytes(), threading.Event(), [0], []

    def watch() -> None:
        while not done.wait(0.001):
            seen[0] = max(seen[0], anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()
        found.append(max(seen[0], anonymous_bytes()) - before)


def weights_of(model: Any) -> dict[str, Tensor]:
    """This process's part of each weight, and the scales of 4-bit weights, by name."""
    found = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{name}"
            own = parameter.detach()
            found[full] = own.to_local() if isinstance(own, DTensor) else own.data
            state = getattr(module, "quant_state", None) if name == "weight" else None
            if state is not None:
                found[f"{full}:absmax"], found[f"{full}:scales"] = state.absmax, state.state2.absmax
    return {name: tensor.contiguous().clone() for name, tensor in found.items()}


def load(job: Job, dtype: str) -> None:
    """Loads a model, makes its trainer, and divides it; leaves parts.<rank>.safetensors and load.<rank>.json."""
    job = replace(job, plan=plan_with(job.plan, dtype=dtype))
    # what is freed goes back to the system, and is no longer counted
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 * KIB)
    session.keep_freed_memory = lambda: None
    release_memory()  # of an earlier job
    give_back_freed_memory()
    rows, meter = session.ordered_rows(job), MemoryMeter.start("cpu")
    with anonymous_peak() as peak:
        model = build_model(job.config, job.plan, job.ranks.local_rank)
        session.open_session(job, model, rows, meter)
    rank = job.ranks.rank
    save_file(weights_of(model), job.run.path / f"parts.{rank}.safetensors")
    (job.run.path / f"load.{rank}.json").write_text(json.dumps({"peak": peak[0]}))
