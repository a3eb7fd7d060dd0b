"""The configs that need no download: the demo reaches its scores, and GSM8K runs on the random model."""

import pytest

from sft_play.runlog import RunDir, read_json, read_metrics
from tests.conftest import REPOSITORY, SHARED
from tests.integration.cli import sft

pytestmark = pytest.mark.integration

GSM8K = SHARED / "data" / "gsm8k"


@pytest.mark.slow
def test_the_demo_takes_exact_match_on_held_out_rows_from_under_5_to_over_90_percent(tmp_path):
    done = sft("train", "--config", REPOSITORY / "configs" / "demo.yaml", f"output.dir={tmp_path}")
    assert done.code == 0, done.err
    scores = read_json(RunDir(tmp_path / "demo").summary)["eval"]
    assert scores["before"]["exact_match"] < 0.05
    assert scores["after"]["exact_match"] > 0.9
    assert scores["after"]["answered_rows"] == 200 and scores["after"]["split"] == "test"
    assert done.out.count("Pretraining the demo's base model") == 1
    assert done.err == ""
    evaluated = sft("eval", "--json", "--limit", "1", "--config", RunDir(tmp_path / "demo").config)
    assert evaluated.json["model"] == "builtin:demo"  # and not its folder in the cache


@pytest.mark.slow
def test_the_demo_with_images_takes_exact_match_to_over_90_percent(tmp_path):
    done = sft("train", "--config", REPOSITORY / "configs" / "demo_vision.yaml", f"output.dir={tmp_path}")
    assert done.code == 0, done.err
    run = RunDir(tmp_path / "demo_vision")
    summary = read_json(run.summary)
    assert summary["eval"]["before"]["exact_match"] < 0.1 and summary["eval"]["after"]["exact_match"] > 0.9
    assert summary["eval"]["after"]["answered_rows"] == 200 and summary["eval"]["after"]["split"] == "test"
    page = run.path.joinpath("report.html").read_text()
    assert page.count('<img src="data:image/jpeg;base64,') == len(summary["samples"])


@pytest.mark.slow  # test_notebook.py trains a random model, and tests/unit/config/test_load.py reads the config
@pytest.mark.skipif(not GSM8K.is_dir(), reason=f"GSM8K is not in {GSM8K}")
def test_gsm8k_trains_on_the_random_model(tmp_path):
    overrides = [
        f"data.train_path={GSM8K / 'train.jsonl'}",
        f"data.test_path={GSM8K / 'test.jsonl'}",
        f"output.dir={tmp_path}",
    ]
    short = [
        "train.max_steps=12",
        "train.logging_steps=4",
        "data.limit=400",
        "eval.limit=2",
        "eval.max_new_tokens=8",
    ]
    done = sft("train", "--config", REPOSITORY / "configs" / "gsm8k.yaml", *overrides, *short)
    assert done.code == 0, done.err
    losses = [
        record["train/loss"] for record in read_metrics(RunDir(tmp_path / "gsm8k")) if "train/loss" in record
    ]
    assert losses[-1] < losses[0] - 0.5
