"""A new engine touches one file: tests/integration/toy_engine.py goes through plan, launch and training."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sft_play.engines import registry
from sft_play.launch.accelerate import launch_command, run_launcher
from sft_play.machine.gpus import what_if
from sft_play.planning.planner import fastest_plan
from sft_play.planning.request import Request
from sft_play.planning.rows.facts import DataFacts
from sft_play.runlog import RunDir
from sft_play.sizing.facts.architecture import Architecture
from sft_play.train.run import train
from tests.integration.processes import assert_same_curve
from tests.integration.toy_engine import BUFFER, with_toy
from tests.jobs import make_job

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]


@pytest.mark.thorough
def test_a_toy_engine_is_planned(tiny_model, tmp_path, monkeypatch):
    alone = make_job(tiny_model, tmp_path, "alone")
    monkeypatch.setattr(registry, "ENGINES", with_toy())
    facts = DataFacts.of(alone.data, alone.config)
    architecture = Architecture.of(alone.architecture)
    plan = fastest_plan(Request(alone.config, architecture, facts, what_if("RTX 4090", 2), 2))
    assert plan.sharing.engine == "toy" and plan.memory.terms["engine"] >= BUFFER
    assert any("Toy over 2 processes: keeps a buffer" in reason for reason in plan.why)


@pytest.mark.slow  # engines that are there already go the same way, in test_many_processes.py
def test_a_toy_engine_is_launched_and_trained(tiny_model, tmp_path, monkeypatch):
    train(make_job(tiny_model, tmp_path, "alone"))
    monkeypatch.setattr(registry, "ENGINES", with_toy())
    specs = tmp_path / "specs.json"
    where = {"model": str(tiny_model), "output": str(tmp_path)}
    specs.write_text(json.dumps([{**where, "name": "toy", "settings": {}}]))
    script = [str(Path(__file__).with_name("toy_engine.py")), str(specs)]
    command = launch_command(script, engine="toy", device="cpu", processes=2, cores=1)
    result = run_launcher(command, RunDir(tmp_path), timeout_s=300)
    assert result.code == 0, result.message

    assert json.loads((tmp_path / "toy" / "plan.json").read_text())["plan"]["engine"] == "toy"
    saved, expected = (
        load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("toy", "alone")
    )
    for name, weight in expected.items():
        torch.testing.assert_close(saved[name], weight, rtol=1e-4, atol=1e-5)
    assert_same_curve(tmp_path / "toy", tmp_path / "alone", {"train/loss": 1e-5, "eval/loss": 1e-5})
