"""Nothing that a probe has made is alive after it, for any engine, nor the model of a plan that was given up."""

import json

import pytest

from sft_play.engines.registry import ENGINES
from tests.integration.processes import launch_jobs

SCALARS = 64  # bytes of counters that a training leaves on the trainer


def specs_of(model):
    """Full fine-tuning and LoRA under bf16: casts, flat weights and copies in fp32 are then all there."""
    settings = {"mixed_precision": "bf16", "probe": True, "max_steps": 2}
    return [
        {"model": str(model), "name": mode, "settings": {"mode": mode, **settings}, "only_probe": True}
        for mode in ("full", "lora")
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("engine", [engine.name for engine in ENGINES if engine.distributes])
@pytest.mark.timeout(600)
def test_a_probe_leaves_nothing_alive(tiny_model, tmp_path, engine):
    launch_jobs(tmp_path, engine, 2, specs_of(tiny_model))
    for spec in specs_of(tiny_model):
        for rank in range(2):
            found = json.loads((tmp_path / spec["name"] / f"remains.{rank}.json").read_text())
            assert {"optimizer", "AdamW"} <= set(found["parts"])
            assert found["alive"] == [[], []]  # of the first plan, and of the one after it
            assert found["model_given_up_lives"] is False
            for before, after in found["bytes"]:
                assert after <= before + SCALARS
