"""Compiled layers in a trace: they take what the code takes that the compiler generates for them."""

from dataclasses import replace

import pytest
from torch._dynamo.utils import counters

from benchmarks.small_models import WIDE, small_config
from benchmarks.steps import step_of
from sft_play.config.schema import LoraSettings, RunConfig
from sft_play.machine.gpus import detect
from sft_play.plan import Plan
from sft_play.planning.planner import fastest_plan
from sft_play.planning.request import Request
from sft_play.planning.rows.facts import DataFacts
from sft_play.sizing.estimate.estimator import Traces
from sft_play.sizing.facts.architecture import Architecture
from sft_play.sizing.step import JoinedRows, PaddedRows, StepSpec
from sft_play.sizing.trace import compiled
from tests.unit.sizing.real_step import require_predicted

SIZES = WIDE | {"hidden": 64, "inner": 96, "heads": 4, "groups": 2, "head_dim": 16, "vocabulary": 300, "layers": 4}  # fmt: skip
STEP = step_of(
    mode="lora", lora=LoraSettings(r=8), batch=JoinedRows(150), activations="recompute", compiled=True
)


def bytes_of(traces: Traces, spec: StepSpec) -> dict[str, int]:
    return {phase: peak.bytes for phase, peak in traces.step(spec).peaks().items()}


@pytest.mark.slow
def test_compiled_layers_take_less_and_code_is_generated_once_for_all_sizes():
    traces = Traces(small_config("llama", SIZES))
    before = counters["stats"]["unique_graphs"]
    for tokens in (150, 410, 260):
        spec = replace(STEP, batch=JoinedRows(tokens))
        with_code, without = bytes_of(traces, spec), bytes_of(traces, spec.uncompiled)
        assert with_code["backward"] < 0.97 * without["backward"]
        assert with_code["forward"] == without["forward"]  # layers are recomputed
    assert counters["stats"]["unique_graphs"] == before + 1


@pytest.mark.slow  # g++ compiles each
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {}),
        ("qwen3", {"mode": "full", "activations": "keep"}),
        ("gemma3_text", {"mode": "qlora", "activations": "keep", "batch": PaddedRows(3, 50)}),
    ],
)
def test_a_compiled_step_in_the_process_of_its_trace_takes_what_that_says(name, changes):
    spec = step_of(
        **dict(mode="lora", batch=JoinedRows(150), activations="recompute", compiled=True) | changes
    )
    config = small_config(name, SIZES)
    predicted = bytes_of(Traces(config), spec)  # leaves nothing of its own to the step with these lengths
    require_predicted(config, spec)
    assert bytes_of(Traces(config), spec) == predicted


def test_without_generated_code_a_step_takes_at_most_what_it_takes_without_compiling(monkeypatch, capsys):
    def fails(graph, inputs, options):
        raise RuntimeError("another version of the compiler")

    monkeypatch.setattr(compiled, "without_kernels", fails)
    compiled.generating.cache_clear()
    traces = Traces(small_config("llama", SIZES))
    assert bytes_of(traces, STEP) == bytes_of(traces, STEP.uncompiled)
    said = " ".join(capsys.readouterr().out.split())
    assert (
        said.count(
            "compiled layers cannot be traced (backend='fails' raised:); memory is predicted for others"
        )
        == 1
    )
    compiled.generating.cache_clear()


@pytest.mark.slow
def test_a_plan_for_a_cpu_has_the_memory_of_compiled_layers_and_says_so():
    model, rows = Architecture.of(small_config("llama", SIZES)), DataFacts.full_rows(64, 0)

    def planned(compile: bool) -> Plan:
        train = {"compile": compile, "mixed_precision": "no", "gradient_checkpointing": False}
        tree = {"model": {"name": "x", "dtype": "float32"}, "data": {"train_path": "none"}, "train": train}
        config = RunConfig.model_validate(tree)
        return fastest_plan(Request(config, model, rows, replace(detect(), gpus=()), 1))

    plan, plain = planned(True), planned(False)
    assert any("memory is that of the code which the compiler generates" in line for line in plan.why)
    assert plan.memory.peak_bytes < 0.97 * plain.memory.peak_bytes
    assert plan.batch == plain.batch and plan.step_seconds == plain.step_seconds
