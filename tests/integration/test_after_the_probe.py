"""Nothing that a probe has made is alive after it, for any engine, nor the model of a plan that was given up."""

import json

import pytest

from sft_play.engines.registry import ENGINES
from tests.integration.processes import launch_jobs

SCALARS = 64  # bytes of counters that a training leaves on the trainer


# Engines whose ranks start in the same way share a launch, which costs more than what they do.
LAUNCHES = {
    kind: [engine.name for engine in ENGINES if engine.distributes and engine.distributed_type == kind]
    for kind in ("MULTI_GPU", "DEEPSPEED")
}


def test_each_engine_is_in_a_launch():
    assert sum(map(len, LAUNCHES.values())) == sum(engine.distributes for engine in ENGINES)


def specs_of(model, engines):
    """Full fine-tuning and LoRA under bf16: casts, flat weights and copies in fp32 are then all there."""
    settings = {"mixed_precision": "bf16", "probe": True, "batch_size": 4, "max_steps": 2}
    return [
        {
            "model": str(model),
            "name": f"{engine}-{mode}",
            "settings": {"engine": engine, "mode": mode, **settings},
            "only_probe": True,
        }
        for engine in engines
        for mode in ("full", "lora")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["MULTI_GPU", "DEEPSPEED"])
@pytest.mark.timeout(600)
def test_a_probe_leaves_nothing_alive(tiny_model, tmp_path, kind):
    launch_jobs(tmp_path, LAUNCHES[kind][0], 2, specs_of(tiny_model, LAUNCHES[kind]), forked=True)
    for spec in specs_of(tiny_model, LAUNCHES[kind]):
        for rank in range(2):
            found = json.loads((tmp_path / spec["name"] / f"remains.{rank}.json").read_text())
            assert {"optimizer", "AdamW"} <= set(found["parts"]), spec["name"]
            assert found["alive"] == [[], []], spec["name"]  # of the first plan, and of the one after it
            assert found["model_given_up_lives"] is False, spec["name"]
            for before, after in found["bytes"]:
                assert after <= before + SCALARS, spec["name"]
