"""The disk of a run: room for what it saves, and the errors of writes that fail."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from sft_play.choices.optimizers import optimizer_state, state_bytes
from sft_play.engines.registry import engine_of
from sft_play.engines.stored import whole_elements
from sft_play.errors import SftPlayError, StorageError
from sft_play.machine.host import free_bytes
from sft_play.runlog import RunDir
from sft_play.spelling import make
from sft_play.train.callbacks import Heartbeat
from sft_play.train.checkpoints import INCOMPLETE, by_step, going_on
from sft_play.train.ranks import all_agree
from sft_play.train.session import Session
from sft_play.ui.console import warn
from sft_play.units import format_bytes
from sft_play.upstream.torch import wait_longer

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
GONE = {errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.ESTALE, errno.EXDEV}
# In the messages of torch.save when a write fails; they do not give the reason.
TORCH_SAVE = ("PytorchStreamWriter failed", "unexpected pos", "cannot be opened", "Parent directory")


@contextmanager
def disk_errors_explained(run: RunDir, resume_command: str) -> Iterator[None]:
    """Turns what the libraries raise when a write in the block fails into a clear StorageError."""
    try:
        yield
    except SftPlayError:
        raise
    except Exception as error:  # tokenizers raises plain exceptions
        if not run.path.is_dir():
            raise StorageError(
                f"the run directory {run.path} was removed or can no longer be reached while the run was "
                f"writing to it; nothing more can be saved. Run `{make('train')}` again"
            ) from error
        reason = write_failure(error, run.path)
        if reason is None:
            raise
        raise StorageError(
            f"cannot write to {run.path}: {reason}. Free space there, or make it writable, and "
            f"{going_on(run, resume_command)}; or choose another output.dir"
        ) from error


def write_failure(error: Exception, folder: Path) -> str | None:
    """Why a write into `folder` failed; None if the error is about something else."""
    if isinstance(error, OSError):
        name = error.filename if isinstance(error.filename, str | bytes | Path) else ""
        named = Path(os.fsdecode(name)).absolute()  # TensorBoard's writer opens names in bytes
        ours = bool(name) and named.is_relative_to(folder.absolute())
        told = error.errno in FULL or (ours and error.errno in GONE)
        return os.strerror(error.errno) if told and error.errno else None
    number = re.search(r"os error (\d+)", str(error))  # of safetensors and tokenizers
    if number and int(number[1]) in FULL | GONE:
        return os.strerror(int(number[1]))
    return "a file could not be written" if any(words in str(error) for words in TORCH_SAVE) else None


SLOW_DISK = 100e6  # bytes per second: an assumption
MARGIN = 1.2  # disks allocate whole blocks, and logs grow meanwhile


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def weights_bytes(session: Session) -> int:
    """Size of the weights in a checkpoint."""
    return sum(whole_elements(weight) * weight.element_size() for weight in _kept(session))


def result_bytes(session: Session) -> int:
    """Size of the weights that the run leaves, which a whole model has in another type."""
    if session.saved_dtype is None:
        return weights_bytes(session)
    element = getattr(torch, session.saved_dtype).itemsize
    return sum(whole_elements(weight) for weight in _kept(session)) * element


def _kept(session: Session) -> list[torch.Tensor]:
    """The weights that are saved."""
    everything = session.job.config.tuning.mode == "full"
    model: Any = session.trainer.model
    return [weight for weight in model.parameters() if everything or weight.requires_grad]


def checkpoint_bytes(session: Session) -> int:
    """Size of a checkpoint: the weights, and the optimizer's state of each trained one."""
    job, model = session.job, session.trainer.model
    optimizer, device = job.config.train.optimizer, job.plan.device
    engine = engine_of(job.plan.sharing.engine)
    trained = [weight for weight in model.parameters() if weight.requires_grad]  # type: ignore[union-attr]
    elements = sum(whole_elements(weight) for weight in trained)
    of_each = (_state_bytes_of(weight, optimizer, device) for weight in trained)
    kept = state_bytes(optimizer, device, elements) if engine.shards_state else sum(of_each)
    return weights_bytes(session) + engine.state_on_disk(elements, kept)


def _state_bytes_of(weight: torch.Tensor, optimizer: str, device: str) -> int:
    with torch.device("meta"):
        state = optimizer_state(optimizer, torch.empty_like(weight, device="meta"), device)
    return sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))


def saved_bytes(session: Session) -> int:
    """Size of a checkpoint and the result together."""
    return checkpoint_bytes(session) + result_bytes(session)


def saving_s(session: Session) -> float:
    """Seconds that processes wait for each other while one writes a checkpoint or the result.

    It is parallel.timeout_s, unless a slow disk takes longer for what a large model saves.
    """
    return max(session.job.config.parallel.timeout_s, saved_bytes(session) / SLOW_DISK)


def require_space(session: Session) -> None:
    """Raises a StorageError before the first step if a checkpoint and the result do not fit on the disk."""
    job = session.job
    needed = int(saved_bytes(session) * MARGIN)
    free = free_bytes(job.run.path)
    if not all_agree(free >= needed or not job.keeps_files):
        raise StorageError(
            f"{job.run.path}: {format_bytes(free)} free, but a checkpoint and the result need "
            f"{format_bytes(needed)}. Free space, or choose another output.dir"
        )


@contextmanager
def waiting_longer(session: Session) -> Iterator[None]:
    """In the block, this process waits for others, if there are any, as long as `saving_s` says."""
    if session.job.plan.sharing.world_size == 1:
        yield
        return
    limit_s = saving_s(session)
    beats = (each for each in session.trainer.callback_handler.callbacks if isinstance(each, Heartbeat))
    wait_longer(limit_s)
    with next(beats).saving(limit_s):
        yield
    wait_longer(session.job.config.parallel.timeout_s)


class SpaceForSaves(TrainerCallback):
    """Leaves out a checkpoint that does not fit on the disk; the run ends if the next one does not either.

    Older checkpoints are deleted after a newer one is complete, so there must be room for one more. A write
    that fails all the same is treated alike in a single process; several wait for each other while saving.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._left_out = False

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Decides whether the checkpoint of this step is saved; all ranks decide the same.

        Raises:
            StorageError: the checkpoint before was left out too, there is none, or the run is being stopped.
        """
        if not control.should_save:
            return
        job = self._session.job
        saved = by_step(job.run)
        size = size_of(saved[-1]) if saved else checkpoint_bytes(self._session)
        needed, free = int(size * MARGIN), free_bytes(job.run.path)
        if all_agree(free >= needed or not job.keeps_files):
            return
        self._leave_out(
            f"step {state.global_step}: no checkpoint, since it needs {format_bytes(needed)} and "
            f"{format_bytes(free)} are free on the disk of {job.run.path}"
        )
        control.should_save = False

    def _leave_out(self, text: str) -> None:
        trainer = self._session.trainer
        last = trainer.state.global_step >= trainer.state.max_steps
        needed = self._left_out or not by_step(self._session.job.run) or trainer.control.should_training_stop
        if needed and not last:
            job = self._session.job
            raise StorageError(f"{text}. Free space, and {going_on(job.run, job.resume_command)}")
        self._left_out = True
        then = "the result follows" if last else "free space before the next one, or the run ends there"
        warn(f"{text}; {then}")

    @contextmanager
    def while_saving(self) -> Iterator[None]:
        """In the block, a checkpoint is written; if that fails, it is left out.

        Raises:
            StorageError: it cannot be left out, for the reasons of `on_step_end`.
        """
        job, state = self._session.job, self._session.trainer.state
        best = state.best_model_checkpoint
        try:
            with waiting_longer(self._session):
                yield
        except Exception as error:
            reason = write_failure(error, job.run.path)
            if reason is None or job.plan.sharing.world_size > 1 or not by_step(job.run):
                raise
            shutil.rmtree(job.run.checkpoints / INCOMPLETE, ignore_errors=True)
            state.best_model_checkpoint = best
            self._leave_out(
                f"step {state.global_step}: no checkpoint, since {job.run.path} cannot be written: {reason}"
            )
        else:
            self._left_out = False
