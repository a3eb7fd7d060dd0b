"""The main path of a training run; `train(job)` is its table of contents.

data -> model -> trainer -> verify -> probe -> begin -> steps -> save -> summary
"""

import signal
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from transformers import TrainerState

from sft_play.data.prepare import PreparedData
from sft_play.data.stats import SPLITS
from sft_play.engines.registry import engine_of
from sft_play.errors import Interrupted
from sft_play.fingerprints import installed_versions
from sft_play.job import Job, begin_run
from sft_play.model.architecture.shape import class_to_name
from sft_play.planning.speed.measured_speed import Timing
from sft_play.runlog import RunDir, read_metrics, update_summary
from sft_play.sizing.estimate.corrections import ProbeResult, write_run_memory
from sft_play.train.callbacks import RamWatch
from sft_play.train.checkpoints import BestOfThisRun, step_of
from sft_play.train.disk import SpaceForSaves, disk_errors_explained, require_space, saving_s
from sft_play.train.memory_meter import measured_memory, of_run, predicted_memory
from sft_play.train.metered_steps import MeteredSteps, highest_step
from sft_play.train.pickles import only_tensors
from sft_play.train.probe import correction_path
from sft_play.train.ranks import from_all
from sft_play.train.recovery import StopOnSignal, ended_at_once, memory_errors_explained, remembered
from sft_play.train.refuted import forget_if_wrong, is_refuted
from sft_play.train.resume import checkpoint_to_resume, clear_way
from sft_play.train.saving import Saved, facts_of_weights, save
from sft_play.train.session import Session, prepare_session
from sft_play.train.settle import settle_plan
from sft_play.train.speeds import keep_times
from sft_play.upstream.torch import wait_longer

OF_STEPS = ("tokens_per_second", "training_seconds", "start_seconds", "mfu", "data_wait")  # by the reporter
TIMED_STEPS = 5  # from which on their average says more than the probe's single step


def train(job: Job) -> None:
    """Trains on this process's device, together with the other ranks if there are any.

    Raises:
        Interrupted: a signal stopped it after a checkpoint was saved.
        NonFiniteError: loss or gradients were NaN or infinite in too many steps, or the weights are.
        OutOfMemory: memory ran out in a step or an evaluation.
        DoesNotFitError: memory ran out before the first step.
        StorageError: the disk is full.
        LaunchError: the ranks do not agree.
        CheckpointError: no checkpoint is left to resume from.
        ConfigError: the checkpoint belongs to a run with other settings; or as in `prepare_session`.
    """
    checkpoint = checkpoint_to_resume(job)  # before anything large is loaded
    job = replace(job, checkpoint=checkpoint)
    with memory_errors_explained(job.plan), disk_errors_explained(job.run, job.resume_command):
        session, probed = settled_session(job)
        require_space(session)
        begin_run(session.job)
        clear_way(session.job, checkpoint)
        with remembered(session):
            stopped, metered = run_steps(session, checkpoint)
        remember_speed(session)
        if session.job.plan.sharing.world_size > 1:
            wait_longer(saving_s(session))  # to the end: the others wait there
        saved = None if stopped else save(session)  # it has its checkpoint instead
    summarise(session, probed, metered, saved)


def settled_session(job: Job) -> tuple[Session, ProbeResult | None]:
    """A session whose plan was measured to fit, and the probe result; a signal ends it at once.

    A rank of several leaves SIGTERM to its launcher, which ends the others with it when one fails.
    """
    others = () if job.plan.sharing.world_size > 1 else (signal.SIGTERM, signal.SIGHUP)
    with ended_at_once(signal.SIGINT, *others):
        return settle_plan(prepare_session(job))


def run_steps(session: Session, checkpoint: Path | None) -> tuple[bool, MeteredSteps | None]:
    """Trains from the start or from a checkpoint; returns whether a signal stopped it, and a CPU's memory."""
    trainer = session.trainer
    if checkpoint:
        # it was done at the start; doing it again would count against the patience of early stopping
        trainer.args.eval_on_start = False
        trainer.add_callback(BestOfThisRun(checkpoint))
    trainer.begin_phase = session.reporter.show_phase
    metered, first = None, highest_step(session.job.plan, trainer.args)
    if trainer.args.device.type == "cpu" and first is not None:
        metered = MeteredSteps(first, trainer)
        trainer.callback_handler.callbacks.insert(0, metered)
        trainer.begin_phase = both(metered.begin, trainer.begin_phase)
    stop = StopOnSignal()
    trainer.add_callback(stop)
    for callback in session.job.hooks.callbacks:
        trainer.add_callback(callback)
    space = SpaceForSaves(session)
    trainer.while_saving = space.while_saving
    trainer.add_callback(space)  # the last one, which sees whether the others want to save
    try:
        with stop.handlers, only_tensors(engine_of(session.job.plan.sharing.engine)):
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    finally:
        session.reporter.end_bar()
    return stop.stopped, metered


def both(*functions: Callable[[str], None]) -> Callable[[str], None]:
    """A function that calls these, one after the other."""

    def call(phase: str) -> None:
        for function in functions:
            function(phase)

    return call


def remember_speed(session: Session) -> None:
    """Stores how fast the steps were, for the next plan, if there were enough of them."""
    job, reporter = session.job, session.reporter
    speed, seconds = reporter.tokens_per_second, reporter.step_seconds
    if reporter.timed_steps >= TIMED_STEPS:
        assert speed and seconds
        keep_times(job, Timing.of(job.plan, seconds, job.plan.sharing.world_size / speed))
        if job.ranks.is_main and is_refuted(job.plan, seconds):
            forget_if_wrong(job, seconds)


def remember_memory(session: Session, run: ProbeResult) -> None:
    """Stores the most that a whole run took, for the next plan; on a CPU, only two steps were measured."""
    job = session.job
    if job.ranks.is_main and job.plan.device == "cuda" and job.checkpoint is None:
        write_run_memory(correction_path(job, job.plan), job.plan, run)


def data_counts(data: PreparedData) -> dict[str, object]:
    """Counts of each split, and the fingerprint of the tokenized rows."""
    counts: dict[str, object] = {"fingerprint": data.fingerprint}
    for split in SPLITS:
        found, shown = data.stats[split], ("rows", "tokens", "supervised_tokens")
        counts[split] = {key: value for key, value in found.items() if key in shown} if found else None
    return counts


def best_step(state: TrainerState) -> int:
    """The step whose weights were kept: the best checkpoint's, or the last."""
    kept = step_of(Path(state.best_model_checkpoint)) if state.best_model_checkpoint else None
    return kept if kept is not None else state.global_step


def evaluations_by_step(run: RunDir) -> dict[int, dict[str, float]]:
    """Step -> {"loss", "token_accuracy"} of the validation rows, from metrics.jsonl."""
    found = {}
    for record in read_metrics(run):
        if "eval/loss" in record:
            scores = (name for name in record if name.startswith("eval/"))
            found[record["step"]] = {name.removeprefix("eval/"): record[name] for name in scores}
    return found


def before_and_after(
    run: RunDir, state: TrainerState, saved: Saved | None
) -> dict[str, dict[str, float] | None]:
    """The scores of the validation rows, the later ones of the weights that were saved; None if unknown."""
    found = evaluations_by_step(run)  # also those from before an interruption
    scores = saved.scores if saved else None
    return {"before": found.get(0), "after": scores or found.get(best_step(state))}


def measured_ram(session: Session) -> int | None:
    """RAM of the processes of a machine in a run that offloads to it; all ranks must call it.

    Seen before updates and after checkpoints. Pinned memory may be counted by the driver instead.
    """
    callbacks = session.trainer.callback_handler.callbacks
    watch = next((each for each in callbacks if isinstance(each, RamWatch)), None)
    return None if watch is None else sum(from_all(watch.peak_bytes)) // session.job.plan.sharing.machines


def summarise(
    session: Session, probed: ProbeResult | None, metered: MeteredSteps | None, saved: Saved | None
) -> None:
    """Writes summary.json on the main rank; nothing is saved if a signal stopped the run.

    Raises:
        Interrupted: after writing, when a signal stopped the run.
    """
    job, rows, reporter, device = session.job, session.rows, session.reporter, session.trainer.args.device
    plan, state, stopped = job.plan, session.trainer.state, saved is None
    of_whole = of_run(reporter.meter, device, metered)
    if not stopped:
        remember_memory(session, of_whole)
    losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
    summary: dict[str, object] = {
        "status": "interrupted" if stopped else "trained",  # what comes after it decides (commands/train.py)
        "error": None,  # of an earlier attempt
        "device": plan.device,
        "world_size": plan.sharing.world_size,
        "sequence_ranks": plan.sharing.sequence_ranks,
        "packing": plan.rows.packing,
        "effective_batch_size": plan.batch.effective,
        "micro_batch_size": plan.batch.micro,
        "micro_batch_tokens": plan.rows.most_tokens,
        "padding_free": plan.rows.joined,
        "gradient_accumulation_steps": plan.batch.accumulation,
        "optimizer_steps": state.global_step,
        "resumed_step": reporter.began_at,  # 0 of a run that was not interrupted; the seconds are since then
        "skipped_steps": session.trainer.skipped.total,
        "out_of_memory": [],  # whoever goes on after it adds what was said (commands/train.py)
        "supervised_tokens": sum(rows.supervised_per_step[: state.global_step]),
        **{name: getattr(reporter, name) for name in OF_STEPS},
        "padding_share": rows.padding_share,
        "predicted_step_seconds": plan.step_seconds,
        "predicted_step_origin": plan.step_seconds_origin if plan.step_seconds else None,
        "refuted_step_seconds": plan.refuted_seconds,
        "measured_step_seconds": reporter.step_seconds,
        **predicted_memory(plan),
        **measured_memory(of_whole, device, probed, metered),
        "predicted_ram_bytes": plan.memory.host.needed_bytes if plan.memory and plan.memory.host else None,
        "measured_ram_bytes": measured_ram(session),
        "probe": asdict(probed) if probed else None,
        "train_loss": losses[-1] if losses else None,
        "data": data_counts(job.data),
        "model_class": class_to_name(job.architecture),
        "versions": installed_versions(),
        "eval": before_and_after(job.run, state, saved),
        "samples": [],  # whoever compares answers adds them; not those of an earlier end
        **facts_of_weights(session, saved),
        "best_checkpoint": state.best_model_checkpoint,
        "weights_step": None if stopped else best_step(state),
    }
    if job.ranks.is_main:
        update_summary(job.run, **summary)
    if stopped:
        raise Interrupted(
            f"stopped at step {state.global_step} with a checkpoint in {job.run.checkpoints}; "
            f"continue with: {job.resume_command}"
        )
