"""Kernels take turns on the user's own device before training: the fastest that compute the same are taken.

The steps are those of the probe, at the plan's micro-batch, with a learning rate of zero and the same random
numbers: what differs between two of them is what computes norms, rotary embeddings and gated layers, or
whether decoder layers are compiled.
"""

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from transformers import TrainerCallback

from sft_play.choices.kernels import COMPILED, LAYERS
from sft_play.engines.registry import engine_of
from sft_play.errors import ConfigError, first_line
from sft_play.job import Job, request_of
from sft_play.machine.compiler import missing_for_compiler
from sft_play.model.layers.compilation import compiled_forwards, plain_forwards
from sft_play.model.layers.own_passes import forward_of, forwards_with, replace_forward
from sft_play.plan import PROBED, Plan
from sft_play.planning.allowed import estimator_of
from sft_play.planning.budget import training_device
from sft_play.planning.candidates.compiled import may_compile
from sft_play.planning.request import Request
from sft_play.planning.speed.clock import plan_clock
from sft_play.planning.speed.timed_kernels import (
    Verdict,
    keep_seconds_to_compile,
    kernels_path,
    read_verdicts,
    seconds_to_compile,
    winners_of,
    write_verdict,
)
from sft_play.sizing.estimate.corrections import ProbeResult
from sft_play.sizing.facts.architecture import text_of
from sft_play.spelling import make
from sft_play.train.probe import as_it_was, fits_alone, let_go, run_steps, step_of_highest
from sft_play.train.ranks import all_agree, from_all, from_main, now
from sft_play.train.session import Session
from sft_play.ui.console import console, warn
from sft_play.units import format_duration
from sft_play.upstream.accelerate import is_out_of_memory

TURNS = 4  # steps of each side, in alternating order; the first one warms up
SIXTEEN_BITS = 0.02  # by which losses and gradient norms may differ, as heads of 16 bits do (decision 0104)

Forwards = Mapping[torch.nn.Module, Any]  # module -> the function by which it computes


class Rival(NamedTuple):
    """What a plan is compared with."""

    plan: Plan
    to_compile: float  # seconds before its first step

    @property
    def label(self) -> str:
        """Its kernels, as a person calls them."""
        return COMPILED.label if self.plan.kernels.compiled else LAYERS[self.plan.kernels.layers].label


def timed_kernels(session: Session, result: ProbeResult, allowance: float) -> Plan | None:
    """The plan with the kernels that were found to be faster, within so many seconds; None if none were.

    All ranks must call it, and get the same. What was found is kept, so that no later run has to ask.
    """
    job, verdicts, step = session.job, dict[str, Verdict](), result.step_seconds or math.inf
    worth_it = all_agree(2 * TURNS * step <= allowance)  # what is left of the allowance differs between ranks
    began, rivals = time.monotonic(), from_main(lambda: rivals_of(job, step)) if worth_it else {}
    for name, rival in rivals.items():
        cost = 2 * TURNS * step + rival.to_compile
        if not all_agree(time.monotonic() - began + cost <= allowance):
            continue
        if rival.to_compile > 1:
            console().print(f"  compiling layers, for about {format_duration(rival.to_compile)}")
        found = verdicts[name] = take_turns(session, name)
        console().print(f"  timed: {found.said(rival.label)}", style="dim")
        if job.ranks.is_main:
            path = _path(job)
            write_verdict(path, name, found.beside_own(read_verdicts(path).get(job.plan.kernels.layers)))
            if rival.plan.kernels.compiled and not found.problem:
                keep_seconds_to_compile(training_device(job.machine).name, found.first_seconds)
    if not (won := winners_of(verdicts)):
        return None
    plan, why = rivals[won[0]].plan, verdicts[won[0]].said(rivals[won[0]].label)
    return replace(plan, kernels_origin=PROBED, why=(*plan.why, f"timed here before step 1: {why}"))


def _path(job: Job) -> Path:
    device = training_device(job.machine).name
    return kernels_path(text_of(job.architecture), device, job.config, job.plan)


def rivals_of(job: Job, step_seconds: float) -> dict[str, Rival]:
    """Plans that differ in their kernels alone, are predicted to fit and were not timed lately, by kernels.

    None in a run that goes on, or where ranks would wait for one that fails.
    """
    plan = job.plan
    several = plan.sharing.world_size > 1
    together = several and (engine_of(plan.sharing.engine).shards_weights or plan.sharing.sequence_parallel)
    if job.checkpoint is not None or together or plan.memory is None:
        return {}
    request, known, found = request_of(job), read_verdicts(_path(job)), dict[str, Rival]()
    estimate, clock = estimator_of(request), plan_clock(request)
    possible = _compiled(request, plan, step_seconds, known) | _other_kernels(job)
    for name, (other, to_compile) in possible.items():
        if name not in known:
            memory = estimate(job.config, other, complete=True)
            if memory.fits:
                seconds = clock(job.config, other)
                found[name] = Rival(replace(other, memory=memory, profile_seconds=seconds), to_compile)
    return found


def _compiled(
    request: Request, plan: Plan, step_seconds: float, known: Mapping[str, Verdict]
) -> dict[str, Rival]:
    """The plan with compiled layers, where that is expected to gain more than it costs.

    They take the place of other kernels that were found to be faster than ours.
    """
    own = plan.with_layers("own") if request.config.train.kernels == "auto" else plan
    may = may_compile(request.config, own, request.architecture, request.facts.pictures)
    if plan.kernels.compiled or not may or missing_for_compiler(plan.device):
        return {}
    otherwise, times_as_fast = COMPILED.expected[plan.device]
    seconds = seconds_to_compile(request.device.name, otherwise)
    share = known[plan.kernels.layers].share if plan.kernels.layers in known else 1.0
    gain = step_seconds * plan.schedule.total_steps * (1 - 1 / (times_as_fast * share))
    return {COMPILED.name: Rival(own.with_compiled(True), seconds)} if gain > seconds else {}


def _other_kernels(job: Job) -> dict[str, Rival]:
    """The plan with each of the other kernels that this device runs; none where the config says which."""
    plan = job.plan
    if job.config.train.kernels != "auto" or plan.kernels.compiled:
        return {}
    return {
        name: Rival(plan.with_layers(name), 0.0)
        for name, row in LAYERS.items()
        if row.runs_on(plan.device, plan.compute_capability)
        and row.is_installed()
        and name != plan.kernels.layers
    }


def take_turns(session: Session, name: str) -> Verdict:
    """Times steps with these kernels and with those in use in turn; the session is left as it was.

    All ranks must call it; the slowest of them counts.
    """
    trainer, plan, began = session.trainer, session.job.plan, time.monotonic()
    model: Any = trainer.model
    ours, theirs = both_forwards(model, name, plan.kernels.layers)
    if not theirs:
        return Verdict(problem="the model has no modules that they compute")
    rows, turns = step_of_highest(session.rows.dataset, plan), _Turns((ours, theirs), trainer.args.device)
    try:
        with as_it_was(trainer):
            alone = _fails_alone(session, rows, theirs) if plan.sharing.world_size > 1 else ""
            problems = [each for each in from_all(alone) if each]
            if problems or (problems := [each for each in from_all(_run(session, rows, turns)) if each]):
                return Verdict(problem=problems[0])
    finally:
        switch(ours)
    of_ranks = from_all((turns.seconds, time.monotonic() - began))
    slowest = [np.max([each[0][side] for each in of_ranks], axis=0).tolist() for side in (0, 1)]
    found = from_all(verdict_of(slowest, turns.values, tolerance_of(model, plan)))  # each has its own loss
    verdict = next((each for each in found if each.problem), found[0])
    steps = TURNS * ((verdict.seconds or 0.0) + (verdict.beside or 0.0))
    return replace(verdict, first_seconds=max(0.0, max(seconds for _, seconds in of_ranks) - steps))


def require_same_results(session: Session) -> None:
    """Compares compiled layers, if the config asks for them, with plain ones, in a step of each.

    All ranks must call it. Kernels that took turns are compared already.

    Raises:
        ConfigError: their losses or gradients differ. PyTorch 2.11 left gradients out of layers that it
            compiled, without a word (decision 0107).
    """
    trainer, plan = session.trainer, session.job.plan
    if not plan.kernels.compiled or plan.kernels_origin == PROBED:
        return
    if not from_main(lambda: _fits(session.job, plan.with_compiled(False))):
        warn("compiled layers are not compared with plain ones, which may not fit")
        return
    plain = plain_forwards(trainer.model)
    compiled = {layer: forward_of(layer) for layer in plain}
    rows, turns = step_of_highest(session.rows.dataset, plan), _Turns((plain, compiled), trainer.args.device)
    try:
        with as_it_was(trainer):
            problem = _run(session, rows, turns, 2)
    finally:
        switch(compiled)
    if problem:
        warn(f"compiled layers are not compared with plain ones: {problem}")
        return
    found = from_all(difference(turns.values, tolerance_of(trainer.model, plan)))
    if wrong := next(filter(None, found), ""):
        raise ConfigError(
            f"train.compile=true: PyTorch {torch.__version__} compiles layers that compute something else "
            f"than plain ones ({wrong}); run `{make('train', ARGS='train.compile=false')}`"
        )


def _fits(job: Job, plan: Plan) -> bool:
    """Whether such a plan is predicted to fit."""
    known = job.plan.memory is not None
    return known and estimator_of(request_of(job))(job.config, plan, complete=True).fits


def both_forwards(model: torch.nn.Module, name: str, in_use: str) -> tuple[Forwards, Forwards]:
    """How the modules compute that other kernels serve: now, and by those. The model is left as it is.

    Compiled layers take the place of the kernels in use: what these fuse, the compiler does.
    """
    theirs = forwards_with(model, "own" if name == COMPILED.name else name, instead_of=in_use)
    if name == COMPILED.name:
        theirs |= compiled_forwards(model)
    return {module: forward_of(module) for module in theirs}, theirs


def switch(forwards: Forwards) -> None:
    """Lets modules compute so."""
    for module, forward in forwards.items():
        replace_forward(module, forward)


class _Turns(TrainerCallback):
    """Lets two sides compute steps in turn; notes the seconds of each, its loss and its gradient norm."""

    def __init__(self, sides: tuple[Forwards, Forwards], device: torch.device) -> None:
        self.sides, self.device, self.steps = sides, device, 0
        self.seconds: tuple[list[float], list[float]] = ([], [])
        self.values: tuple[list[tuple[float, float]], ...] = ([], [])

    def on_step_begin(self, args: object, state: object, control: object, **_: object) -> None:
        switch(self.sides[self.steps % 2])
        torch.manual_seed(0)  # of dropout
        self.began = now(self.device)

    def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
        self.seconds[self.steps % 2].append(now(self.device) - self.began)
        self.steps += 1

    def note(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """In place of the trainer's log, which comes after the end of a step."""
        if "loss" in logs:
            self.values[(self.steps - 1) % 2].append((logs["loss"], logs.get("grad_norm", math.nan)))


def _run(session: Session, rows: Dataset, turns: _Turns, steps: int = 2 * TURNS) -> str:
    """Runs so many steps; what went wrong, if no other rank is waiting."""
    trainer: Any = session.trainer
    trainer.args = copy.copy(trainer.args)
    trainer.args.logging_steps = 1
    trainer.begin_phase, trainer.log = lambda phase: None, turns.note
    try:
        run_steps(session, rows, turns, steps)
    except Exception as error:  # whatever a compiler or a kernel raises
        if session.job.plan.sharing.world_size > 1:
            raise
        return _problem(error)
    finally:
        del trainer.log
        let_go(trainer, engine_of(session.job.plan.sharing.engine))
    return ""


def _fails_alone(session: Session, rows: Dataset, theirs: Forwards) -> str:
    """What goes wrong in one forward and backward pass without the other ranks; "" if nothing."""
    switch(theirs)
    try:
        return "" if fits_alone(session, rows) else "memory ran out"
    except Exception as error:  # as in `_run`
        return _problem(error)


def _problem(error: Exception) -> str:
    if is_out_of_memory(error):
        return "memory ran out"
    return f"they failed: {type(error).__name__}: {first_line(error)}"


def tolerance_of(model: Any, plan: Plan) -> float:
    """By how much loss and gradient norm may differ, as a share: by the order of sums, in fp32."""
    if plan.precision.computed_in != "float32":
        return SIXTEEN_BITS
    config: Any = model.config.get_text_config()
    rows = sum(weight.shape[-1] for weight in model.parameters() if weight.dim() > 1)
    tokens = plan.rows.most_tokens
    terms = 2 * (rows + 2 * tokens * config.num_hidden_layers) + config.vocab_size + tokens
    return terms**0.5 * torch.finfo(torch.float32).eps


def verdict_of(
    seconds: Sequence[Sequence[float]], values: Sequence[Sequence[tuple[float, float]]], tolerance: float
) -> Verdict:
    """What steps say of the second of two sides: seconds, and losses with gradient norms, of each; pure."""
    if wrong := difference(values, tolerance):
        return Verdict(problem=f"their result differs: {wrong}")
    beside, own = (side[1:] for side in seconds)
    spread = max(max(side) - min(side) for side in (beside, own))
    return Verdict(seconds=median(own), beside=median(beside), spread=spread)


def difference(values: Sequence[Sequence[tuple[float, float]]], tolerance: float) -> str:
    """How the last loss and gradient norm of the second of two sides differ from those of the first; pure."""
    for place, what in enumerate(("loss", "gradient norm")):
        ours, theirs = (side[-1][place] for side in values)
        if not abs(theirs - ours) <= tolerance * abs(ours):  # NaN is not
            return f"{what} {theirs:.6g} instead of {ours:.6g}"
    return ""
