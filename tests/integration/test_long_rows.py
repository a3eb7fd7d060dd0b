"""Rows beyond a model's positions, from training to the exported file."""

import json

import pytest
from transformers import AutoConfig

from sft_play.runlog import RunDir, read_json
from tests.integration.cli import make_workspace, sft, write_rows

pytestmark = pytest.mark.usefixtures("one_thread")
SCALED = ["model.rope_scaling.rope_type=yarn", "model.rope_scaling.factor=4"]


@pytest.fixture
def config(tiny_model, tmp_path):
    """A run whose longest row has more than twice the 512 positions of its model."""
    config = make_workspace(tmp_path, tiny_model)
    question = {"role": "user", "content": " ".join(f"w{number % 100}" for number in range(1200))}
    rows = [{"messages": [question, {"role": "assistant", "content": f"w{row} w9"}]} for row in range(9)]
    write_rows(tmp_path / "train.jsonl", rows)
    return config


@pytest.mark.slow
def test_rows_beyond_the_positions_are_left_out_or_trained_with_scaled_ones(config, tmp_path):
    refused = sft("train", "--config", config)
    assert refused.code == 3 and "longer than 512 tokens" in refused.err
    done = sft("train", "--config", config, "train.max_steps=2", *SCALED)
    assert done.code == 0, done.err
    run = RunDir(tmp_path / "runs" / "one")
    assert read_json(run.path / "plan.json")["plan"]["max_seq_len"] > 1200
    trained = ("--config", run.config)  # with the settings of the run, as RUN= gives them
    other = sft("merge", "--config", config)  # which lacks the scaling
    assert other.code == 8 and "was trained with model.rope_scaling={'rope_type': 'yarn'" in other.err
    resumed = sft("train", "--resume", *trained, "model.rope_scaling.factor=8")
    assert resumed.code == 2 and "model.rope_scaling: " in resumed.err
    assert sft("merge", *trained).code == 0
    assert sft("merge-test", *trained).code == 0
    merged = AutoConfig.from_pretrained(run.merged)
    assert merged.max_position_embeddings == 2048 and merged.rope_parameters["factor"] == 4
    questions = write_rows(tmp_path / "in.jsonl", [{"prompt": "w1 " * 1000}])
    answered = sft("infer", "--input", questions, "--output", tmp_path / "out.jsonl", *trained)
    assert answered.code == 0, answered.err
    assert json.loads((tmp_path / "out.jsonl").read_text())
    assert sft("eval", "--split", "test", "--limit", "1", *trained).code == 0
