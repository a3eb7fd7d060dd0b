"""THE main path: `train(job)` reads like what it does.

data -> model -> trainer -> verify -> probe -> begin -> steps -> save -> summary
"""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState

from sft_play.errors import DoesNotFitError, Interrupted
from sft_play.job import Job, begin_run
from sft_play.runlog import RunDir, console, is_main_rank, keeps_files, read_metrics, update_summary
from sft_play.sizing.planner import Plan
from sft_play.sizing.records import Proof
from sft_play.train.callbacks import StopOnSignal
from sft_play.train.checkpoints import find_checkpoint, require_movable, step_of
from sft_play.train.disk import disk_errors_explained
from sft_play.train.probe import prove, remedies
from sft_play.train.session import Session


def train(job: Job) -> dict[str, Any]:
    """Trains on this process's device, together with the other ranks if there are any; returns the summary.

    Raises:
        Interrupted: a signal stopped it after a checkpoint was saved.
        NonFiniteError: loss or gradients became NaN.
        DoesNotFitError: memory ran out.
        StorageError: the disk is full.
        LaunchError: the ranks do not agree.
    """
    checkpoint = checkpoint_to_resume(job)
    with memory_errors_explained(job.plan), disk_errors_explained(job.run):
        session, proof = prove(job)
        if keeps_files(job.run):
            begin_run(session.job)
        stopped = run_steps(session, checkpoint)
        save(session, stopped)
    return summarise(session, proof, stopped)


def checkpoint_to_resume(job: Job) -> Path | None:
    """The checkpoint that train.resume means, looked for before anything large is loaded."""
    checkpoint, passed_over = find_checkpoint(job.run, job.config.train.resume)
    for line in passed_over:
        console().print(f"  [yellow]{line}[/]")
    if checkpoint:
        moved = require_movable(checkpoint, job.config, job.plan, whole=job.run.shared)
        console().print(f"  going on from {checkpoint}{', converted for these processes while it is read' if moved else ''}")
    return checkpoint


@contextlib.contextmanager
def memory_errors_explained(plan: Plan) -> Iterator[None]:
    """Turns CUDA's out-of-memory error into ours, with what to change.

    Raises:
        DoesNotFitError: memory ran out in the block.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DoesNotFitError(
            f"memory ran out at micro-batch {plan.micro_batch_size}: {str(error).splitlines()[0]}\n{remedies(plan)}"
        ) from error


def run_steps(session: Session, checkpoint: Path | None) -> bool:
    """Trains from the start or from a checkpoint; returns whether a signal stopped it."""
    trainer = session.trainer
    if checkpoint:
        trainer.args.eval_on_start = False  # it was done then; once more would count against early stopping's patience
    stop = StopOnSignal(session.job.plan.world_size, trainer.args.device)
    trainer.add_callback(stop)
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    finally:
        stop.give_signals_back()
        session.reporter.end_bar()
    return stop.stopped


def result_folder(job: Job) -> Path:
    """Where the trained weights go."""
    return job.run.model if job.config.tuning.mode == "full" else job.run.adapter


def save(session: Session, stopped: bool) -> None:
    """Writes the trained weights and the tokenizer; only the main rank does. A stopped run has its checkpoint instead."""
    trainer, job = session.trainer, session.job
    if stopped or not trainer.accelerator.is_main_process:
        return
    target = result_folder(job)
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    model.save_pretrained(str(target), safe_serialization=True)
    job.tokenizer.save_pretrained(str(target))


def best_step(state: TrainerState) -> int:
    """The step whose weights were kept: the best checkpoint's, or the last."""
    kept = step_of(Path(state.best_model_checkpoint)) if state.best_model_checkpoint else None
    return kept if kept is not None else state.global_step


def evaluations_by_step(run: RunDir) -> dict[int, dict[str, float]]:
    """Step -> {"loss", "token_accuracy"} of the validation rows, from metrics.jsonl."""
    return {
        record["step"]: {name.removeprefix("eval/"): value for name, value in record.items() if name.startswith("eval/")}
        for record in read_metrics(run)
        if "eval/loss" in record
    }


def measured_peak(session: Session, proof: Proof | None) -> int | None:
    """The highest memory of any rank in bytes: of the whole run on a GPU; on a CPU of the probe, which counts as predicted."""
    in_probe = proof.peak_bytes if proof else None
    if session.job.plan.device == "cpu":
        return in_probe
    in_run = torch.tensor(session.reporter.meter.peak_bytes(), device=session.trainer.args.device)
    return max(in_probe or 0, int(session.trainer.accelerator.gather(in_run[None]).max()))


def summarise(session: Session, proof: Proof | None, stopped: bool) -> dict[str, Any]:
    """Writes summary.json on the main rank.

    Raises:
        Interrupted: after writing, when a signal stopped the run.
    """
    job, rows, reporter = session.job, session.rows, session.reporter
    plan, state = job.plan, session.trainer.state
    losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
    evaluations = evaluations_by_step(job.run)  # also those from before an interruption
    summary = {
        "status": "interrupted" if stopped else "done",
        "device": plan.device,
        "world_size": plan.world_size,
        "packing": plan.packing,
        "effective_batch_size": plan.effective_batch_size,
        "micro_batch_size": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "optimizer_steps": state.global_step,
        "supervised_tokens": sum(rows.supervised_per_step[: state.global_step]),
        "tokens_per_second": reporter.tokens_per_second,
        "training_seconds": reporter.training_seconds,
        "predicted_peak_bytes": plan.memory.peak_bytes if plan.memory else None,
        "measured_peak_bytes": measured_peak(session, proof),
        "probe": asdict(proof) if proof else None,
        "train_loss": losses[-1] if losses else None,
        "eval": {"before": evaluations.get(0), "after": evaluations.get(best_step(state))},
        "best_checkpoint": state.best_model_checkpoint,
    }
    if is_main_rank():
        summary = update_summary(job.run, **summary)
    if stopped:
        raise Interrupted(
            f"stopped at step {state.global_step} with a checkpoint in {job.run.checkpoints}; `make resume` goes on"
        )
    return summary
