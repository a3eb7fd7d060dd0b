"""Traces that a second process makes are the same; what it cannot trace, this process traces itself."""

import multiprocessing
import os
import threading

import pytest
from transformers import MambaConfig

from benchmarks.small_models import WIDE, small_config
from sft_play.errors import UntraceableModel
from sft_play.sizing import ahead, trace
from sft_play.sizing.step import StepSpec
from sft_play.sizing.traces import Traces

SMALL = WIDE | {"layers": 3, "vocabulary": 300}
SPEC = StepSpec(mode="lora", joined=True, rows=64, row_tokens=1, longest=32)


@pytest.fixture
def elsewhere(monkeypatch):
    """Runs a function in the second process before each trace; returns the steps that are traced here."""

    def set_up(before=lambda: None):
        here, really = os.getpid(), trace.trace_step
        traced = []

        def trace_step(config, spec, **options):
            traced.append(spec.rows) if os.getpid() == here else before()
            return really(config, spec, **options)

        monkeypatch.setattr(ahead, "usable_cores", lambda: 2)
        monkeypatch.setattr(trace, "trace_step", trace_step)
        return traced

    return set_up


def work_of(config) -> float:
    return Traces(config).work(SPEC).at(500).flop().sum()


@pytest.fixture(scope="module")
def config():
    return small_config("llama", SMALL)


@pytest.fixture(scope="module")
def alone(config):
    return work_of(config)


def test_a_second_process_traces_the_other_step_of_a_pair(elsewhere, config, alone):
    traced = elsewhere()
    with ahead.second_process():
        assert work_of(config) == alone
    assert traced == [64]
    assert work_of(config) == alone and len(traced) == 3  # nothing runs there any more
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    "fault", [lambda: os._exit(1), lambda: threading.Event().wait()], ids=["dies", "hangs"]
)
def test_where_it_fails_this_process_traces_by_itself(elsewhere, monkeypatch, config, alone, fault):
    monkeypatch.setattr(ahead, "PATIENCE_S", 0.1)
    traced = elsewhere(fault)
    with ahead.second_process():
        assert work_of(config) == alone
    assert len(traced) == 2 and not multiprocessing.active_children()


def test_why_a_model_cannot_be_traced_is_said_by_this_process(elsewhere):
    elsewhere()
    config = MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64)
    with ahead.second_process(), pytest.raises(UntraceableModel, match="MambaConfig cannot be traced"):
        work_of(config)


def test_with_one_core_there_is_no_second_process(elsewhere, monkeypatch, config):
    traced = elsewhere()
    monkeypatch.setattr(ahead, "usable_cores", lambda: 1)
    with ahead.second_process():
        work_of(config)
    assert len(traced) == 2
