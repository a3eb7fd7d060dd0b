"""The probe: two real optimizer steps and an evaluation at the largest batch, before training starts.

The steps go through the run's own trainer and engine with a learning rate of zero: AdamW then adds exactly
zero to each weight, so the run starts from the weights that it loaded. Afterwards optimizer states are
discarded and the states of the random number generators restored.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import DefaultFlowCallback, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from sft_play.data.store import column_of
from sft_play.engines.base import Engine
from sft_play.engines.registry import engine_of
from sft_play.errors import DoesNotFitError, first_line
from sft_play.job import Job
from sft_play.model.layers.loss_head import autocast_of, token_loss
from sft_play.model.weights.finished import release_memory
from sft_play.plan import Plan
from sft_play.planning.budget import training_device
from sft_play.sizing.estimate.corrections import (
    ProbeResult,
    record_path,
    write_overhead,
    write_ran_out,
    write_record,
)
from sft_play.sizing.facts.architecture import text_of
from sft_play.sizing.meters.phases import PhaseMeter
from sft_play.sizing.step import StepSpec
from sft_play.sizing.trace.trace import prepare_for_training
from sft_play.train.callbacks import Heartbeat
from sft_play.train.memory_meter import overhead_bytes
from sft_play.train.nonfinite import SkippedSteps
from sft_play.train.ranks import all_agree, from_all, now
from sft_play.train.session import Session
from sft_play.train.trainer import PlannedTrainer
from sft_play.ui.progress import spinner
from sft_play.upstream.accelerate import is_out_of_memory, wrapped_as_before

STEPS = 2  # the second already has optimizer states, and the higher peak
WARM_UP = "warm-up"  # phase of the first


def probe(session: Session) -> ProbeResult:
    """Measures the batches with the highest peaks over all ranks, and leaves the session as it was."""
    trainer, plan = session.trainer, session.job.plan
    rows = step_of_highest(session.rows.dataset, plan)
    with as_it_was(trainer), spinner("  probe: two steps and an evaluation at the largest batch"):
        # where weights or tokens are divided, any pass needs all ranks
        together = engine_of(plan.sharing.engine).shards_weights or plan.sharing.sequence_parallel
        alone = plan.sharing.world_size == 1 or together or fits_alone(session, rows)
        result = ProbeResult(ran_out=True)
        if all_agree(alone):
            result = ProbeResult.of_all(from_all(_measure(session, rows)))
    if session.job.ranks.is_main:
        path, machine = correction_path(session.job, plan), session.job.machine
        write_record(path, plan, result)
        if result.ran_out:
            write_ran_out(path, plan)
        if result.overhead_bytes:
            device = training_device(machine).name
            write_overhead(device, machine.driver, plan.sharing.world_size, result.overhead_bytes)
    trainer.accelerator.wait_for_everyone()
    return result


def correction_path(job: Job, plan: Plan) -> Path:
    """The file with the corrections for a plan's kind of step."""
    architecture = text_of(job.architecture)
    return record_path(architecture, training_device(job.machine).name, job.config, plan)


def largest_micro_batch(batches: Dataset) -> int:
    """The place of the micro-batch with the most tokens."""
    return int(column_of(batches, "tokens").argmax())


def step_of_highest(batches: Dataset, plan: Plan) -> Dataset:
    """A step's micro-batches: the one whose peak is predicted to be the highest, in the state that it is in.

    The first one of a step finds no gradients: that of its step follows it. Any other follows itself, and so
    finds gradients; where those in between leave them whole, it is followed, too. If batches are not known
    to the prediction, the micro-batch is the one with the most tokens.
    """
    found = plan.memory.highest if plan.memory else None
    place = largest_micro_batch(batches) if found is None else found.train * plan.sharing.sequence_ranks
    several = plan.batch.accumulation > 1
    if several and place % (plan.batch.accumulation * plan.sharing.world_size) < plan.sharing.world_size:
        return batches.select([place, place + plan.sharing.world_size])
    between = found is not None and not found.last
    return batches.select([place] * (1 + several + between))


def expected_phases(plan: Plan, sizes: Sequence[int]) -> dict[str, int]:
    """The predicted peak of each phase for the step of a probe; {} if its batches are unknown.

    A run's trainer holds all batches of a step, the probe only those of these `sizes`, in bytes; and none in
    an evaluation.
    """
    found = plan.memory.highest if plan.memory else None
    if found is None:
        return {}
    others = sum(sizes[1:])
    fewer = {"forward": found.held - others, "backward": found.held - others}
    fewer |= {"optimizer": found.held_after - others, "evaluation": found.held_after}
    return {phase: size - fewer.get(phase, 0) for phase, size in found.phases.items()}


def batch_sizes(session: Session, rows: Dataset) -> list[int]:
    """The bytes that this process holds of each micro-batch."""
    found = []
    for row in rows:
        batch = session.trainer.data_collator([row])
        found.append(sum(value.nbytes for value in batch.values() if isinstance(value, torch.Tensor)))
    return found


def fits_alone(session: Session, rows: Dataset) -> bool:
    """Whether one forward and backward pass fits, without the engine.

    If a rank runs out of memory here, no other one is left waiting. The trainer's own loss cannot be used: it
    counts tokens over all ranks.
    """
    trainer, plan = session.trainer, session.job.plan
    model: Any = trainer.model
    prepare_for_training(model, StepSpec.of(session.job.config, plan))
    try:
        inputs = trainer.micro_batch(rows)
        with autocast_of(plan.precision.autocast, trainer.accelerator.device.type):
            loss = token_loss(model, inputs)
        loss.backward()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        model.zero_grad(set_to_none=True)
    return True


class _Clock(TrainerCallback):
    """Marks the phases of the last step and times it, and its first micro-batch if it has another one."""

    def __init__(self, meter: PhaseMeter, device: torch.device) -> None:
        self.meter, self.device = meter, device
        self.steps = 0
        self.seconds: float | None = None
        self.first: float | None = None

    def begin(self, phase: str) -> None:
        """The first step has no optimizer states yet, and libraries set themselves up in it."""
        self.meter.begin(phase if self.steps == STEPS else WARM_UP)

    def on_step_begin(self, args: object, state: object, control: object, **kwargs: object) -> None:
        self.steps += 1
        self.began = now(self.device)

    def on_substep_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        self.first = now(self.device) - self.began

    def on_pre_optimizer_step(self, args: object, state: object, control: object, **kwargs: object) -> None:
        self.meter.anchor()
        self.begin("optimizer")

    def on_step_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        self.seconds = now(self.device) - self.began


def _measure(session: Session, rows: Dataset) -> ProbeResult:
    """Runs the steps; running out of memory is a result, not an error, if no other rank is waiting."""
    trainer, plan = session.trainer, session.job.plan
    ran_out, overhead = False, None
    model: Any = trainer.model
    with PhaseMeter(trainer.args.device, model) as meter:
        clock = _Clock(meter, trainer.args.device)
        try:
            _run(session, rows, clock)
            overhead = overhead_bytes(trainer.args.device)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if plan.sharing.world_size > 1:
                write_ran_out(correction_path(session.job, plan), plan)  # the next run plans without it
                raise DoesNotFitError(
                    f"memory ran out in the probe of micro-batch {plan.batch.micro}: "
                    f"{first_line(error)}\n{memory_advice(plan)}"
                ) from error
            ran_out = True
        finally:
            let_go(trainer, engine_of(plan.sharing.engine))
    step = None if clock.seconds is None else _average_step(session, clock, rows["tokens"])
    return ProbeResult(
        phases={}
        if ran_out
        else {name: peak for name, peak in (meter.peaks or {}).items() if name != WARM_UP},
        expected=expected_phases(plan, batch_sizes(session, rows)),
        reserved_bytes=meter.reserved_bytes,
        overhead_bytes=overhead,
        step_seconds=step,
        seconds_per_token=None if step is None else step / _tokens_per_step(session),
        ran_out=ran_out or meter.retries > 0,
    )


def _tokens_per_step(session: Session) -> float:
    """Tokens of this process in an average step, padding not counted."""
    tokens = session.rows.tokens_per_step
    return sum(tokens) / len(tokens) / session.job.plan.sharing.world_size


def _average_step(session: Session, clock: _Clock, tokens: Sequence[float]) -> float:
    """Seconds of an average step, from a step that has fewer micro-batches, of so many `tokens`.

    What comes once per step, such as the update and DDP's exchange, is not multiplied with the micro-batches.
    """
    assert clock.seconds is not None
    first = clock.seconds if clock.first is None else clock.first
    tokens = [count / session.job.plan.sharing.sequence_ranks for count in tokens]  # of this process
    each = first / tokens[0]
    once = max(0.0, clock.seconds - each * sum(tokens))
    return once + each * _tokens_per_step(session) / (1 - session.rows.padding_share)


def _run(session: Session, rows: Dataset, clock: _Clock) -> None:
    trainer, plan = session.trainer, session.job.plan
    trainer.begin_phase = clock.begin
    run_steps(session, rows, clock, STEPS)
    batches: Any = trainer.eval_dataset
    if batches is not None:
        trainer.evaluate(batches.select([_evaluated(batches, plan)] * plan.sharing.world_size))


def run_steps(session: Session, rows: Dataset, clock: TrainerCallback, steps: int) -> None:
    """So many optimizer steps that change nothing, on the same rows, within `as_it_was`."""
    trainer, plan = session.trainer, session.job.plan
    settings = copy.copy(trainer.args)
    settings.max_steps, settings.learning_rate, settings.warmup_steps = steps, 0.0, 0
    settings.gradient_accumulation_steps = len(rows)
    settings.eval_on_start = settings.load_best_model_at_end = False
    settings.eval_strategy, settings.save_strategy = IntervalStrategy.NO, SaveStrategy.NO
    trainer.args = settings
    in_a_step = [number for number in range(len(rows)) for _ in range(plan.sharing.world_size)]
    trainer.train_dataset = rows.select(steps * in_a_step)
    beats = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, Heartbeat)]
    callbacks = [DefaultFlowCallback, clock, *beats]
    trainer.callback_handler = CallbackHandler(callbacks, trainer.model, trainer.processing_class, None, None)
    trainer.skipped = SkippedSteps(steps + 1)
    trainer.train()


def _evaluated(batches: Dataset, plan: Plan) -> int:
    """The place of the batch of an evaluation with the highest predicted peak."""
    found = plan.memory.highest if plan.memory else None
    if found is None or found.evaluation is None:
        return largest_micro_batch(batches)
    return found.evaluation * plan.sharing.sequence_ranks


@contextmanager
def as_it_was(trainer: PlannedTrainer) -> Iterator[None]:
    """Resets the trainer after the block, even after an error: settings, rows, random numbers."""
    names = ("args", "train_dataset", "callback_handler", "begin_phase", "skipped")
    before = {name: getattr(trainer, name) for name in names}
    scaler = trainer.accelerator.scaler
    scale = copy.deepcopy(scaler.state_dict()) if scaler is not None else {}
    if scale:
        # at the initial scale of fp16 the first steps often overflow and are skipped, optimizer states too
        scaler.load_state_dict({**scale, "scale": 1.0})
    on_gpu = [trainer.args.device] if trainer.args.device.type == "cuda" else []
    with torch.random.fork_rng(devices=on_gpu), wrapped_as_before(trainer.model):
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(trainer, name, value)
            trainer.state, trainer.control = TrainerState(), TrainerControl()
            if scale:
                scaler.load_state_dict(scale)


def let_go(trainer: Any, engine: Engine) -> None:
    """Frees gradients, optimizer and engine."""
    engine.let_go(trainer.model_wrapped)
    trainer.optimizer = trainer.lr_scheduler = None
    trainer.callback_handler.optimizer = trainer.callback_handler.lr_scheduler = None
    trainer.callback_handler.train_dataloader = trainer.callback_handler.eval_dataloader = None
    trainer.model_wrapped = trainer.model
    if hasattr(trainer, "deepspeed"):
        trainer.deepspeed = None
    trainer.model.zero_grad(set_to_none=True)
    trainer._tr_loss = None
    trainer.accelerator.free_memory()
    release_memory()


def memory_advice(plan: Plan) -> str:
    """What to change after memory ran out."""
    smaller = "tuning.mode=qlora or model.max_seq_len=<shorter>"
    if plan.rows_per_micro_batch > 1:
        smaller = f"train.batch_size={plan.rows.max_seq_len if plan.rows.packing else 1}"
    recompute = "" if plan.activations.recomputes else "train.gradient_checkpointing=true or "
    return f"Try {recompute}{smaller}"
