"""Predicts seconds and memory of steps that were measured on a GPU, from its data sheet alone; needs no GPU.

    python -m benchmarks.gpu_seconds

It adds the predictions to benchmarks/results/gpu/NVIDIA-H200-x1.json: to each step its memory, as
sizing_gpu does where it is measured; to each turn of our own its peak and the seconds of its steps after the
first one, at the tokens that each of them had; to the run those of its average step.
"""

import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_cases import Target, architecture, predict, spec_from_json
from benchmarks.measurement_log import RESULTS, write_result
from benchmarks.sizing_gpu import figures, with_errors
from benchmarks.throughput import COURSES, make_rows, prepared, run_config
from benchmarks.throughput_sides import CHOICES
from sft_play.machine.gpus import what_if
from sft_play.plan import Plan
from sft_play.planning.planner import fastest_plan
from sft_play.planning.request import Request
from sft_play.planning.rows.facts import DataFacts
from sft_play.planning.speed.clock import step_seconds
from sft_play.planning.speed.devices import derived_profile
from sft_play.planning.speed.profile import MicroBatch
from sft_play.sizing.estimate.estimator import shared_traces
from sft_play.sizing.facts.architecture import Architecture
from sft_play.sizing.step import SHARES, JoinedRows, StepSpec
from sft_play.train.rows import training_rows
from sft_play.work import fused

FILE = RESULTS / "gpu" / "NVIDIA-H200-x1.json"
LISTS = ("steps", "turns")


def turn_of(gpu: str, name: str, side: str) -> tuple[Plan, list[int], Callable[..., float]]:
    """The plan of a turn, the tokens of each step, and a function that predicts a step of so many tokens.

    The function also takes the mean length of its rows, and the share of tokens that are supervised.
    """
    course = next(each for each in COURSES if each.name == name)
    rows, machine = make_rows(course, architecture(course.model).vocab_size), what_if(gpu)
    with tempfile.TemporaryDirectory() as folder:
        config = run_config(course, rows, Path(folder), **CHOICES.get(side, {}))
        facts = DataFacts.of(prepared(course, rows, Path(folder)), config)
    model, lengths = Architecture.of(architecture(course.model)), np.array(rows["length"], float)
    plan = fastest_plan(Request(config, model, facts, machine, 1))
    hidden = architecture(course.model).hidden_size
    chosen = training_rows(rows, plan, seed=0, hidden_size=hidden, pad_id=0)
    profile, spec = derived_profile(machine, 1), replace(StepSpec.of(config, plan), eval_share=None)
    assert profile and plan.batch.accumulation == 1, "steps of one micro-batch were measured"
    average = float((lengths**2).sum() / lengths.sum())  # of the row that a token is in

    def seconds(tokens: int, length: float = average, share: float = 1.0) -> float:
        own = replace(spec, batch=JoinedRows(tokens), supervised_share=round(share * SHARES) / SHARES)
        work = shared_traces(model).work(own).at(tokens)
        batch = MicroBatch(tokens, tokens * length, tokens / lengths.mean())
        return round(sum(step_seconds(fused(work) if config.train.asks_compile else work, profile, batch)), 4)

    return plan, chosen.tokens_per_step, seconds


def predicted(tree: dict[str, Any]) -> dict[str, Any]:
    """The results with what is predicted now."""
    made, run = tree["made_on"], tree["run"]
    gpu, memory = made["gpu"], tree["parts"]["memory"]
    target = Target(made["device"], gpu, tuple(made["compute_capability"]))
    tree["steps"] = [
        with_errors(step, predict(step["model"], spec_from_json(step["spec"]), target))
        for step in tree["steps"]
    ]
    found = figures(tree["steps"], memory["cases"]["planned_for"])
    memory |= {name: found[name] for name in ("errors", "worst_under_prediction_of_reserved")}
    for turn in tree["turns"]:
        if turn["side"] in ("sft-play", *CHOICES):
            plan, tokens, seconds = turn_of(gpu, turn["course"], turn["side"])
            assert plan.memory
            turn |= {"predicted_peak_bytes": plan.memory.peak_bytes, "step_tokens": tokens}
            turn["data_sheet_step_seconds"] = [seconds(one) for one in tokens[1:]]
    mean = run["tokens_per_second"] * run["measured_step_seconds"]
    share = run["supervised_tokens"] / run["optimizer_steps"] / mean
    *_, seconds = turn_of(gpu, "LoRA 8B, packed", "sft-play")
    run["data_sheet_step_seconds"] = seconds(round(mean), mean / run["effective_batch_size"], share)
    return tree


def main() -> int:
    """Writes the predictions into the file of measurements."""
    warnings.simplefilter("ignore")
    tree = predicted(json.loads(FILE.read_text(encoding="utf-8")))
    write_result(FILE, tree, {name: tree.pop(name) for name in LISTS})
    return 0


if __name__ == "__main__":
    sys.exit(main())
