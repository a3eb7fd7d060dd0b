"""Where the time of an optimizer step goes: this trainer beside a bare loop over the same micro-batches.

    make bench-step                          # every micro-batch of a 20M LoRA workload; a few minutes
    make bench-step ARGS="--operations 15"   # also the operations that take the most time

Both sides have the same weights, the same micro-batches from the run's own collator, the same attention, and
fused AdamW; they alternate. The bare loop is forward with the loss of transformers, backward, clipping and
update. What the trainer does outside of these parts is "rest".
"""

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.measurement_log import RESULTS, made_on, versions, write_result
from benchmarks.planner import CPU, WORKLOADS, Work, all_plans
from benchmarks.random_models import random_model
from sft_play.plan import Plan
from sft_play.sizing.trace.trace import trained_parameters
from sft_play.train.session import Session, close_session
from sft_play.ui.console import console, quiet_libraries

PARTS = ("data", "forward", "backward", "clip", "update", "rest")
WORKLOAD = "20M-lora-tailed-1p"
ROUNDS = 3
AIM = 0.05  # of the bare loop's time


class Parts:
    """Seconds by part, of the steps after the first."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.steps: list[float] = []  # when each one ended

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time counts as that part."""

        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - began

        return call

    def end_step(self, *_: Any) -> None:
        """Marks the end of a step; the first one, which warms up, is forgotten."""
        self.steps.append(time.perf_counter())
        if len(self.steps) == 1:
            self.seconds.clear()

    def per_step(self) -> dict[str, float]:
        """Seconds of an average step, by part and in all."""
        count = len(self.steps) - 1
        total = (self.steps[-1] - self.steps[0]) / count
        known = {part: self.seconds[part] / count for part in PARTS if part != "rest"}
        return known | {"rest": total - sum(known.values()), "total": total}


def trainer_parts(session: Session) -> Parts:
    """The run's own trainer, from the first step to the last."""
    parts, trainer = Parts(), session.trainer
    trainer.get_batch_samples = parts.timed("data", trainer.get_batch_samples)
    trainer.compute_loss = parts.timed("forward", trainer.compute_loss)
    trainer.accelerator.backward = parts.timed("backward", trainer.accelerator.backward)
    trainer._clip_grad_norm = parts.timed("clip", trainer._clip_grad_norm)
    optimizer = trainer.create_optimizer()
    optimizer.step = parts.timed("update", optimizer.step)
    optimizer.register_step_post_hook(parts.end_step)
    trainer.train()
    return parts


def bare_parts(session: Session, model: Any) -> Parts:
    """A loop over the same micro-batches."""
    parts, plan, batches = Parts(), session.job.plan, session.rows.dataset
    weights = trained_parameters(model.train())
    optimizer = torch.optim.AdamW(weights, plan.schedule.learning_rate, fused=True)
    optimizer.register_step_post_hook(parts.end_step)
    if plan.activations.recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    collate = parts.timed("data", session.trainer.data_collator)
    forward = parts.timed("forward", lambda **batch: model(**batch, use_cache=False).loss)
    backward = parts.timed("backward", torch.Tensor.backward)
    clip = parts.timed("clip", torch.nn.utils.clip_grad_norm_)
    update = parts.timed("update", optimizer.step)
    each = plan.batch.accumulation
    for start in range(0, len(batches), each):
        step = [collate([batches[number]]) for number in range(start, start + each)]
        items = sum((batch["labels"][:, 1:] != -100).sum() for batch in step)
        for batch in step:
            backward(forward(**batch, num_items_in_batch=items))
        clip(weights, 1.0)
        update()
        optimizer.zero_grad()
    return parts


def one_round(work: Work, plan: Plan, sides: list[str]) -> dict[str, dict[str, float]]:
    """Both sides once, in this order."""
    found = {}
    for side in sides:
        session = work.session(plan)
        model = random_model(work.architecture, plan, work.config.tuning, CPU) if side == "bare" else None
        run = {"trainer": lambda: trainer_parts(session), "bare": lambda: bare_parts(session, model)}[side]  # noqa: B023
        found[side] = run().per_step()
        close_session(session, plan)
    return found


def measured(work: Work, plan: Plan) -> dict[str, Any]:
    """The medians of the rounds; every other one begins with the other side."""
    sides = ["trainer", "bare"]
    rounds = [one_round(work, plan, sides[:: 1 if number % 2 == 0 else -1]) for number in range(ROUNDS)]
    entry: dict[str, Any] = {
        "micro_batch": plan.batch.micro,
        "accumulation": plan.batch.accumulation,
    }
    for side in sides:
        entry[side] = {
            part: statistics.median(found[side][part] for found in rounds) for part in (*PARTS, "total")
        }
    ratios = [found["trainer"]["total"] / found["bare"]["total"] - 1 for found in rounds]
    return entry | {"overhead": statistics.median(ratios), "overheads": ratios}


def operations(work: Work, plan: Plan, count: int) -> None:
    """Prints the operations that take the most time, for both sides."""
    for side in ("trainer", "bare"):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            one_round(work, plan, [side])
        console().print(f"{side}: operations by their own time", markup=False)
        table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=count)
        console().print(table, markup=False, highlight=False, soft_wrap=True)


def result_table(entries: list[dict[str, Any]]) -> Table:
    """Milliseconds of each part, the trainer's beside the bare loop's."""
    table = Table(title=f"{WORKLOAD}: ms of an optimizer step, trainer / bare loop")
    for name in ("micro-batch", *PARTS, "total", "overhead"):
        table.add_column(name, justify="right")
    for entry in entries:
        pairs = [
            f"{1e3 * entry['trainer'][part]:,.0f} / {1e3 * entry['bare'][part]:,.0f}"
            for part in (*PARTS, "total")
        ]
        name = f"{entry['micro_batch']} x {entry['accumulation']}"
        table.add_row(name, *pairs, f"{entry['overhead']:+.1%}")
    return table


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and writes; 1 if the overhead is above the aim."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--operations", type=int, help="print so many operations of the chosen plan")
    parser.add_argument("--micro-batch", type=int, help="only this one; nothing is written")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    load = next(load for load in WORKLOADS if load.name == WORKLOAD)
    with tempfile.TemporaryDirectory() as folder, quiet_libraries(Path(folder) / "log.txt"):
        work = Work(load, Path(folder))
        kept = [plan for plan in all_plans(work) if not plan.activations.recomputes]
        plans = [plan for plan in kept if args.micro_batch in (None, plan.batch.micro)]
        if args.operations:
            operations(work, plans[0], args.operations)
            return 0
        entries = [measured(work, plan) for plan in plans]
    console().print(result_table(entries))
    if args.micro_batch is None:
        record = {"what": (__doc__ or "").splitlines()[0], "made_on": made_on(CPU), "versions": versions()}
        write_result(RESULTS / "step_parts_cpu.json", record | {"workload": WORKLOAD}, {"plans": entries})
    return int(max(entry["overhead"] for entry in entries) > AIM)


if __name__ == "__main__":
    sys.exit(main())
