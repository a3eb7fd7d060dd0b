"""How long a GPU would wait for Python between two optimizer steps, measured without one.

    python -m benchmarks.between_steps    # a few minutes, and best on an idle machine

A step ends with the norm of its gradients, which the CPU reads; until it begins the next forward pass, a GPU
has little to do. The CPU's time from the one to the other, and that of clipping, is measured in LoRA runs of
tiny matrices, by this trainer and by the library's own methods, in turns. It depends on the number of modules
and not on their sizes. "calls" are the seconds besides the update, in calls of an operation as the device
profile times them: what the clock counts for a GPU that was measured.
"""

import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from rich.table import Table
from transformers import Trainer

from benchmarks.measurement_log import RESULTS, made_on, versions, write_result
from benchmarks.planner import CPU, GEOMETRIES, Work, Workload
from benchmarks.small_models import small_config
from sft_play.planning.speed.measurement import measure
from sft_play.train.session import Session, close_session
from sft_play.ui.console import console, quiet_libraries

LAYERS = (8, 32)
GEOMETRY = {"hidden": 64, "inner": 128, "heads": 4, "groups": 2, "head_dim": 16}
ROUNDS, STEPS = 4, 24
PARTS = ("clip", "between", "update")
SIDES: dict[str, tuple[str, ...]] = {"ours": (), "the library's": ("_run_epoch", "_clip_grad_norm")}


def step_parts(session: Session, own_methods: tuple[str, ...]) -> dict[str, float]:
    """Median CPU seconds of this thread by part, with these methods of transformers instead of ours."""
    trainer: Any = session.trainer
    spent: dict[str, list[float]] = {part: [] for part in PARTS}
    normed: list[float] = []

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            found = function(*args, **kwargs)
            spent[part].append(time.thread_time() - began)
            return found

        return call

    def norm(*args: Any, **kwargs: Any) -> Any:
        found = type(trainer)._get_grad_norm(trainer, *args, **kwargs)
        normed.append(time.thread_time())
        return found

    def loss(*args: Any, **kwargs: Any) -> Any:
        if normed:
            spent["between"].append(time.thread_time() - normed.pop())
        return type(trainer).compute_loss(trainer, *args, **kwargs)

    for name in own_methods:
        setattr(trainer, name, MethodType(getattr(Trainer, name), trainer))
    trainer._clip_grad_norm = timed("clip", trainer._clip_grad_norm)
    trainer._get_grad_norm, trainer.compute_loss = norm, loss
    optimizer = trainer.create_optimizer()
    optimizer.step = timed("update", optimizer.step)
    trainer.train()
    return {part: statistics.median(seconds[2:]) for part, seconds in spent.items()}


def measured(layers: int, call_s: float) -> dict[str, Any]:
    """The medians of the rounds; every other one begins with the other side."""
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder, quiet_libraries(Path(folder) / "log.txt"):
        work = Work(Workload("2M", "lora", "even"), Path(folder))
        work.config = work.config.changed({"train.max_steps": STEPS, "train.eval_steps": STEPS})
        work.architecture = small_config("llama", GEOMETRIES["2M"] | GEOMETRY | {"layers": layers})
        plan = work.plan(lambda plan: plan.batch.accumulation == 1 and not plan.activations.recomputes)
        for number in range(ROUNDS):
            for side in list(SIDES)[:: 1 if number % 2 == 0 else -1]:
                session = work.session(replace(plan, memory=None))
                found[side].append(step_parts(session, SIDES[side]))
                close_session(session, plan)
    sides = {
        side: {part: statistics.median(one[part] for one in rounds) for part in PARTS}
        for side, rounds in found.items()
    }
    rest = sides["ours"]["between"] - sides["ours"]["update"]
    return {"layers": layers, **sides, "calls": round(rest / call_s)}


def result_table(entries: list[dict[str, Any]]) -> Table:
    """Milliseconds of each part."""
    table = Table(title="ms of a step, in which a GPU may wait")
    for name in ("layers", "methods", *PARTS, "calls"):
        table.add_column(name, justify="right")
    for entry in entries:
        for side in SIDES:
            parts = [f"{1e3 * entry[side][part]:.2f}" for part in PARTS]
            table.add_row(str(entry["layers"]), side, *parts, str(entry["calls"]) if side == "ours" else "")
    return table


def main() -> int:
    """Measures, prints and writes."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    call_s = measure("CPU", 1, sixteen_bit=False).call_forward_s
    entries = [measured(layers, call_s) for layers in LAYERS]
    console().print(result_table(entries))
    record = {"what": (__doc__ or "").splitlines()[0], "made_on": made_on(CPU), "versions": versions()}
    write_result(RESULTS / "between_steps.json", record | {"call_s": call_s}, {"runs": entries})
    return 0


if __name__ == "__main__":
    sys.exit(main())
