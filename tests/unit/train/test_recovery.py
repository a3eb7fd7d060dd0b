"""What ends a run in the middle: memory that runs out; Ctrl-C, wherever Python is at that moment."""

import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerControl, TrainerState

from sft_play.errors import DoesNotFitError, OutOfMemory
from sft_play.machine.process import ended_by_signals
from sft_play.runlog import RunDir
from sft_play.train.probe import memory_advice
from sft_play.train.recovery import StopOnSignal, ended_at_once, memory_errors_explained, remembered
from sft_play.upstream.accelerate import is_out_of_memory
from tests.plans import plan_with
from tests.unit.train.plans import PLAN

ARGS = SimpleNamespace(device=torch.device("cpu"))


class Swallows:
    """Its destructor runs while the signal arrives, so Python drops the exception that the handler raises."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_python_drops_arrives_nevertheless():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), ended_at_once(signal.SIGINT):
        Swallows()
        time.sleep(60)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_is_dropped_at_the_end_counts_too():
    with pytest.raises(KeyboardInterrupt), ended_at_once(signal.SIGINT):
        Swallows()


def test_without_an_interrupt_nothing_happens():
    with ended_at_once(signal.SIGINT):
        pass
    with pytest.raises(ValueError), ended_at_once(signal.SIGINT):
        raise ValueError


@pytest.fixture
def stop():
    callback = StopOnSignal()
    callback.on_train_begin(None, TrainerState(), TrainerControl())
    yield callback
    callback.handlers.close()


def test_before_the_first_step_is_done_ctrl_c_ends_training_at_once(stop):
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_after_a_step_ctrl_c_saves_a_checkpoint_and_a_second_one_ends_at_once(stop):
    state, control = TrainerState(global_step=1, max_steps=9), TrainerControl()
    stop.on_step_end(ARGS, state, control)
    signal.raise_signal(signal.SIGINT)
    stop.on_step_end(ARGS, state, control)
    assert control.should_save and control.should_training_stop and stop.stopped
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_before_the_first_step_is_done_other_signals_still_save(stop, number):
    signal.raise_signal(number)
    control = TrainerControl()
    stop.on_step_end(ARGS, TrainerState(global_step=1, max_steps=9), control)
    assert control.should_save


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_in_a_probe_other_signals_end_the_run_with_a_word(number):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt, match=f"stopped by {signal.Signals(number).name}"):
        with ended_at_once(signal.SIGINT, number):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_a_hangup_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        callback = StopOnSignal()
        callback.on_train_begin(None, TrainerState(), TrainerControl())
        with ended_at_once(signal.SIGHUP), ended_by_signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            signal.raise_signal(signal.SIGHUP)
        callback.handlers.close()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_error_of_the_allocator_of_the_cpu_is_recognized():
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**60, dtype=torch.uint8)  # more than an address space holds
    assert is_out_of_memory(error.value)
    assert is_out_of_memory(MemoryError()) and not is_out_of_memory(RuntimeError("shapes do not match"))


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (
            torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
            True,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (torch.distributed.DistBackendError("NCCL error: Cuda failure 2 'out of memory'"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_cuda_its_libraries_and_triton_run_out_of_memory_in_their_own_words(error, full):
    assert is_out_of_memory(error) == full


def test_running_out_of_memory_says_what_to_change():
    with (
        pytest.raises(
            DoesNotFitError, match=r"micro-batch 4: .*\n.*gradient_checkpointing=true or train.batch_size=1"
        ),
        memory_errors_explained(PLAN),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({}, "train.gradient_checkpointing=true or train.batch_size=1"),
        ({"activations": "recompute"}, "train.batch_size=1"),
        ({"activations": "recompute", "packing": True, "effective_batch_size": 512}, "train.batch_size=64"),
        (
            {"activations": "recompute", "effective_batch_size": 2},
            "tuning.mode=qlora or model.max_seq_len=<shorter>",
        ),
    ],
)
def test_what_to_change_is_something_else_than_what_the_plan_has(settings, advice):
    assert memory_advice(plan_with(PLAN, **settings)) == f"Try {advice}"


def test_a_run_that_saved_nothing_is_not_said_to_have_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr("sft_play.train.recovery.write_ran_out", lambda *_: None)
    monkeypatch.setattr("sft_play.train.recovery.correction_path", lambda *_: None)
    job = SimpleNamespace(plan=PLAN, run=RunDir(tmp_path), resume_command="make resume")
    state = SimpleNamespace(state=SimpleNamespace(global_step=1))
    session: Any = SimpleNamespace(job=job, trainer=state)
    with (
        pytest.raises(OutOfMemory, match="Or start again, as there is no checkpoint: make resume$"),
        remembered(session),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
