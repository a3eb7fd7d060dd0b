"""The probe: two optimizer steps and an evaluation batch for real, at the largest batch, before anything is trained.

The steps go through the run's own trainer, engine and all, with a learning rate of zero: AdamW then adds exactly zero to each
weight, so that the run begins from the weights it loaded. Optimizer states are thrown away and random numbers put back.
"""

import copy
import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset
from rich.padding import Padding
from transformers import DefaultFlowCallback, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from sft_play.errors import DoesNotFitError
from sft_play.hardware import detect
from sft_play.job import Job
from sft_play.planning import plan_again, record_of
from sft_play.report.probe import proof_line
from sft_play.report.progress import spinner
from sft_play.runlog import console, is_main_rank
from sft_play.sizing.phases import PhaseMeter
from sft_play.sizing.planner import Plan
from sft_play.sizing.records import Proof, write_overhead, write_record
from sft_play.sizing.step import StepSpec
from sft_play.sizing.trace import prepare_for_training, token_loss
from sft_play.train.arguments import eval_batch_rows
from sft_play.train.callbacks import NonFiniteGuard
from sft_play.train.heartbeat import Heartbeat
from sft_play.train.session import Session, TokenWeightedTrainer, open_session
from sft_play.train.verify import verify
from sft_play.units import format_bytes

STEPS = 2  # the second finds optimizer states and is the higher one
ACCUMULATION = 2  # as good as any larger number: from the second micro-batch on gradients are there
ATTEMPTS = 3  # on a CPU events may be lost (sizing/phases.py)
SEARCH_SECONDS = 60.0
WRAPPING = ("forward", "_original_forward", "_is_accelerate_prepared")  # what accelerate.prepare leaves on a model


def prove(job: Job) -> tuple[Session, Proof | None]:
    """A session whose plan was seen to fit; over budget, one smaller plan is tried. With train.probe=search the fastest.

    Raises:
        DoesNotFitError: the smaller plan does not fit either, or the config leaves none.
        LaunchError: the ranks do not agree.
    """
    session = _open(job)
    if job.config.train.probe is False:
        return session, None
    proof = probe(session)
    say_proof(session.job.plan, proof)
    if not proof.fits(session.job.plan):
        smaller = _smaller_plan(session, proof)
        session = _open(_close(session, smaller))
        proof = probe(session)
        say_proof(session.job.plan, proof)
        if not proof.fits(session.job.plan):
            raise DoesNotFitError(f"{_too_much(session.job.plan, proof)}\n{remedies(session.job.plan)}")
    elif job.config.train.probe == "search":
        session, proof = _fastest(session, proof)
    return session, proof


def say_proof(plan: Plan, proof: Proof) -> None:
    """One line for the person who waits."""
    console().print(Padding(proof_line(plan.to_json(), asdict(proof)), (0, 0, 0, 2)))


def _open(job: Job, *, announce: bool = True) -> Session:
    session = open_session(job)
    verify(session.trainer, job.plan, announce=announce)
    return session


def _close(session: Session, plan: Plan) -> Job:
    """Lets go of the model; the job again, with another plan."""
    trainer: Any = session.trainer
    trainer.model = trainer.model_wrapped = trainer.callback_handler.model = None
    _collect(trainer)
    return replace(session.job, plan=plan)


def probe(session: Session) -> Proof:
    """What the largest batch of the run takes, over all ranks; the session is afterwards as it was."""
    trainer, plan = session.trainer, session.job.plan
    rows, share = largest_batch(session.rows.dataset, plan)
    with _as_it_was(trainer):
        alone = _fits_alone(session, rows) if plan.world_size > 1 else True
        if not _all_agree(trainer, alone):
            return Proof(ran_out=True)
        with spinner("  probe: two steps and an evaluation at the largest batch"):
            for _ in range(ATTEMPTS):
                proof = Proof.of_all(gather_object([replace(_measure(session, rows), batch_share=share)]))
                if proof.phases or proof.ran_out:
                    break
    if is_main_rank():
        path, device = record_of(session.job.config, plan)
        write_record(path, plan, proof, device)
        if proof.overhead_bytes:
            write_overhead(device, plan.world_size, proof.overhead_bytes)
    trainer.accelerator.wait_for_everyone()
    return proof


def largest_batch(dataset: Dataset, plan: Plan) -> tuple[Dataset, float]:
    """The rows of the micro-batch with the most tokens as the collator lays them out; these of those the plan allows for."""
    batch, tokens = _largest(dataset, plan.rows_per_micro_batch, packed=plan.packing)
    return batch, tokens / (plan.rows_per_micro_batch * plan.max_seq_len)


def _largest(dataset: Dataset, rows: int, *, packed: bool) -> tuple[Dataset, int]:
    lengths = np.asarray(dataset.with_format("numpy")["length"])
    lengths = lengths[: len(lengths) // rows * rows].reshape(-1, rows)
    sizes = lengths.sum(axis=1) if packed else lengths.max(axis=1) * rows
    at = int(sizes.argmax())
    return dataset.select(range(at * rows, (at + 1) * rows)), int(sizes[at])


def _repeated(rows: Dataset, times: int) -> Dataset:
    return rows.select(np.tile(np.arange(len(rows)), times))


def _fits_alone(session: Session, rows: Dataset) -> bool:
    """Whether one forward and backward pass fits, without the engine: a rank that runs out here leaves no other one waiting.

    The trainer's own loss would not do: it counts tokens over all ranks.
    """
    trainer, plan = session.trainer, session.job.plan
    model: Any = trainer.model
    mode = session.job.config.tuning.mode
    prepare_for_training(model, StepSpec(mode=mode, gradient_checkpointing=plan.gradient_checkpointing))
    try:
        inputs = trainer._prepare_inputs(trainer.data_collator(list(rows)))
        with trainer.accelerator.autocast():
            loss = token_loss(model, inputs)
        loss.backward()
    except torch.OutOfMemoryError:
        return False
    finally:
        model.zero_grad(set_to_none=True)
    return True


def _all_agree(trainer: TokenWeightedTrainer, fine: bool) -> bool:
    return all(gather_object([fine])) if trainer.accelerator.num_processes > 1 else fine


class _Clock(TrainerCallback):
    """Marks the optimizer phase and times the last step."""

    def __init__(self, begin_phase: Callable[[str], None], device: torch.device) -> None:
        self.begin_phase, self.device = begin_phase, device
        self.seconds: float | None = None

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = self._now()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begin_phase("optimizer")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds = self._now() - self.began


def _measure(session: Session, rows: Dataset) -> Proof:
    """Runs the steps; out of memory is an answer where no other rank waits."""
    trainer, plan = session.trainer, session.job.plan
    ran_out, overhead = False, None
    model: Any = trainer.model
    with PhaseMeter(trainer.args.device, model) as meter:
        clock = _Clock(meter.begin, trainer.args.device)
        try:
            _run(session, rows, clock)
            overhead = _overhead(trainer.args.device)
        except torch.OutOfMemoryError as error:
            if plan.world_size > 1:
                raise DoesNotFitError(
                    f"memory ran out in the probe of micro-batch {plan.micro_batch_size}: {str(error).splitlines()[0]}\n"
                    f"{remedies(plan)}"
                ) from error
            ran_out = True
        finally:
            _let_go(trainer)
    step = None if clock.seconds is None else clock.seconds / _accumulation(plan) * plan.gradient_accumulation_steps
    return Proof(
        phases={} if ran_out else meter.peaks or {},
        reserved_bytes=meter.reserved_bytes,
        overhead_bytes=overhead,
        step_seconds=step,
        ran_out=ran_out or meter.retries > 0,
    )


def _overhead(device: torch.device) -> int | None:
    """What this process takes of its GPU beside what PyTorch's allocator holds, as far as the driver tells."""
    if device.type != "cuda":
        return None
    used = [p.used_bytes for gpu in detect().gpus for p in gpu.processes if p.pid == os.getpid() and p.used_bytes]
    return used[0] - torch.cuda.memory_reserved(device) if used else None


def _accumulation(plan: Plan) -> int:
    return min(ACCUMULATION, plan.gradient_accumulation_steps)


def _run(session: Session, rows: Dataset, clock: _Clock) -> None:
    trainer, config, plan = session.trainer, session.job.config, session.job.plan
    settings = copy.copy(trainer.args)
    settings.max_steps, settings.learning_rate, settings.warmup_steps = STEPS, 0.0, 0
    settings.gradient_accumulation_steps = _accumulation(plan)
    settings.eval_on_start = settings.load_best_model_at_end = False
    settings.eval_strategy, settings.save_strategy = IntervalStrategy.NO, SaveStrategy.NO
    trainer.args = settings
    trainer.train_dataset = _repeated(rows, STEPS * _accumulation(plan) * plan.world_size)
    beats = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, Heartbeat)]
    callbacks = [DefaultFlowCallback, clock, NonFiniteGuard(), *beats]
    trainer.callback_handler = CallbackHandler(callbacks, trainer.model, trainer.processing_class, None, None)
    trainer.begin_phase = clock.begin_phase
    trainer.train()
    if trainer.eval_dataset is not None:
        batch, _ = _largest(trainer.eval_dataset, eval_batch_rows(config, plan), packed=False)
        trainer.evaluate(_repeated(batch, plan.world_size))


@contextmanager
def _as_it_was(trainer: TokenWeightedTrainer) -> Iterator[None]:
    """Whatever happens within, the trainer starts from the beginning afterwards: same settings, rows, random numbers."""
    names = ("args", "train_dataset", "callback_handler", "begin_phase")
    before = {name: getattr(trainer, name) for name in names}
    unwrapped = {name: trainer.model.__dict__[name] for name in WRAPPING if name in trainer.model.__dict__}
    scaler = trainer.accelerator.scaler
    scale = copy.deepcopy(scaler.state_dict()) if scaler is not None else {}
    if scale:  # at the scale that fp16 begins with, first steps often overflow and are left out, optimizer states with them
        scaler.load_state_dict({**scale, "scale": 1.0})
    on_gpu = [trainer.args.device] if trainer.args.device.type == "cuda" else []
    with torch.random.fork_rng(devices=on_gpu):
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(trainer, name, value)
            for name in WRAPPING:
                trainer.model.__dict__.pop(name, None)
            trainer.model.__dict__.update(unwrapped)
            trainer.state, trainer.control = TrainerState(), TrainerControl()
            if scale:
                scaler.load_state_dict(scale)


def _let_go(trainer: Any) -> None:
    """Frees gradients, optimizer and engine."""
    trainer.optimizer = trainer.lr_scheduler = None
    trainer.callback_handler.optimizer = trainer.callback_handler.lr_scheduler = None
    trainer.callback_handler.train_dataloader = trainer.callback_handler.eval_dataloader = None
    trainer.model_wrapped = trainer.model
    if hasattr(trainer, "deepspeed"):
        trainer.deepspeed = None
    trainer.model.zero_grad(set_to_none=True)
    trainer._tr_loss = None
    _collect(trainer)


def _collect(trainer: TokenWeightedTrainer) -> None:
    trainer.accelerator.free_memory()
    gc.collect()
    if trainer.args.device.type == "cuda":
        torch.cuda.empty_cache()


def _too_much(plan: Plan, proof: Proof) -> str:
    if proof.peak_bytes is None or plan.memory is None:
        return f"micro-batch {plan.micro_batch_size} does not fit: memory ran out in the probe"
    return (
        f"micro-batch {plan.micro_batch_size} does not fit: the probe measured {format_bytes(proof.peak_bytes)}, the budget is "
        f"{format_bytes(plan.memory.budget_bytes)}"
    )


def remedies(plan: Plan) -> str:
    """What to change where memory ran out."""
    smaller = "train.batch_size=1" if plan.rows_per_micro_batch > 1 else "tuning.mode=qlora or model.max_seq_len=<shorter>"
    return f"Try train.gradient_checkpointing=true or {smaller}"


def _smaller_plan(session: Session, proof: Proof) -> Plan:
    """A plan that takes less, with the same effective batch and engine; rank 0 makes it for all.

    Raises:
        DoesNotFitError: the config leaves none.
    """
    job, plan = session.job, session.job.plan

    def takes_less(other: Plan) -> bool:
        recomputes = other.gradient_checkpointing and not plan.gradient_checkpointing
        return other.micro_batch_size < plan.micro_batch_size or (
            recomputes and other.micro_batch_size == plan.micro_batch_size
        )

    chosen: list[Any] = [None]
    if is_main_rank():
        try:
            smaller = plan_again(job.config, job.data, plan, takes_less)
            chosen = [replace(smaller, why=(*smaller.why, f"chosen because {_too_much(plan, proof)}")).to_json()]
        except DoesNotFitError:
            pass
    broadcast_object_list(chosen)
    if chosen[0] is None:
        raise DoesNotFitError(f"{_too_much(plan, proof)}, and the config leaves nothing smaller\n{remedies(plan)}")
    smaller = Plan.from_json(chosen[0])
    console().print(f"  [yellow]{_too_much(plan, proof)}; planned again:[/] {smaller.why[0]}")
    return smaller


def _fastest(session: Session, proof: Proof) -> tuple[Session, Proof]:
    """Times the plan's alternatives, for a minute in all, and goes on with the fastest."""
    best, began = (session.job.plan, proof), time.monotonic()
    for other in _alternatives(session.job):
        session = _open(_close(session, other), announce=False)
        found = probe(session)
        seconds = found.step_seconds if found.fits(other) else None
        _say_tried(other, found)
        if seconds is not None and (best[1].step_seconds is None or seconds < best[1].step_seconds):
            best = other, found
        if not _all_agree(session.trainer, time.monotonic() - began < SEARCH_SECONDS):
            break
    plan, proof = best
    if session.job.plan != plan:
        session = _open(_close(session, plan))
    return session, proof


def _alternatives(job: Job) -> list[Plan]:
    """The plans of this engine that the search ranked next and that fit; rank 0 makes them for all."""
    plans: list[Any] = [None]
    if is_main_rank():
        wanted = [
            (row["micro_batch_size"], row["gradient_checkpointing"])
            for row in job.plan.alternatives
            if row["fits"] and row["engine"] == job.plan.engine
        ]
        made = [_plan_with(job, *cut) for cut in wanted]
        plans = [[plan.to_json() for plan in made if plan]]
    broadcast_object_list(plans)
    return [Plan.from_json(tree) for tree in plans[0]]


def _plan_with(job: Job, micro_batch_size: int, checkpointing: bool) -> Plan | None:
    """None if it does not fit by now: the probe of the chosen plan may have corrected the prediction."""

    def wanted(plan: Plan) -> bool:
        return plan.micro_batch_size == micro_batch_size and plan.gradient_checkpointing == checkpointing

    try:
        return plan_again(job.config, job.data, job.plan, wanted)
    except DoesNotFitError:
        return None


def _say_tried(plan: Plan, proof: Proof) -> None:
    step = "does not fit" if proof.step_seconds is None else f"{proof.step_seconds:.2f} s a step"
    kept = "recomputed" if plan.gradient_checkpointing else "kept"
    console().print(f"  [dim]tried micro-batch {plan.micro_batch_size}, activations {kept}: {step}[/]")
