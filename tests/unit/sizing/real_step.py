"""A real step on this CPU, beside what its trace says."""

import pytest
import torch
from transformers import PretrainedConfig

from benchmarks.cpu_meter import measure_step
from benchmarks.random_models import random_base
from sft_play.model.adapters.attach import attach_adapter
from sft_play.model.attention import varlen
from sft_play.sizing.estimate.estimator import Traces
from sft_play.sizing.step import StepSpec


def require_predicted(config: PretrainedConfig, spec: StepSpec) -> None:
    """Asserts that each phase of a step in fp32 takes above the weights what is predicted."""
    model = random_base(
        config,
        dtype="float32",
        attn_implementation=varlen.NAME,
        device=torch.device("cpu"),
        quantize=spec.mode == "qlora",
    )
    measured = measure_step(attach_adapter(model, spec.lora) if spec.mode != "full" else model, spec)
    predicted = Traces(config).step(spec).peaks()
    for phase, size in measured.phases.items():
        above = size - measured.weights
        assert predicted[phase].bytes - measured.weights == pytest.approx(above, rel=2e-4, abs=2000), phase
