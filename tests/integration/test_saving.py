"""What a run leaves: a whole model in the type of its base, which says where answers end, its scores, and a status."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from sft_play import cli
from sft_play.config.load import load_config
from sft_play.errors import ConfigError
from sft_play.launch import accelerate
from sft_play.model.layers.loss_head import TokenScore, add_loss_head, score_batch
from sft_play.model.weights.finished import finished_weights
from sft_play.runlog import RunDir, read_json
from sft_play.train.disk import result_bytes, weights_bytes
from sft_play.train.run import train
from sft_play.train.session import prepare_session
from tests.conftest import REPOSITORY
from tests.integration.cli import make_workspace, sft
from tests.integration.processes import launch_jobs
from tests.jobs import losses, make_job, token_rows

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]

END = "w7"
FULL = dict(mode="full", batch_size=4, max_steps=2, save_steps=2, eval_steps=2, learning_rate=1e-3)
TWO = {**FULL, "effective_batch_size": 12, "batch_size": 2}


def based_on(model: Path, folder: Path, dtype: torch.dtype) -> Path:
    """The tiny model in a type, with a chat template whose answers end with a token that the base ignores."""
    AutoModelForCausalLM.from_pretrained(model, dtype=dtype).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": [END]})
    tokenizer.chat_template = tokenizer.chat_template.replace("<eos>", END)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tiny_model, tmp_path_factory) -> Path:
    return based_on(tiny_model, tmp_path_factory.mktemp("saving") / "base", torch.bfloat16)


@pytest.fixture(scope="module")
def run(base, tmp_path_factory) -> RunDir:
    """A full fine-tuning of one process, in fp32."""
    job = make_job(base, tmp_path_factory.mktemp("one"), "full", **FULL)
    train(job)
    return job.run


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def scores_of(folder: Path) -> dict[str, float]:
    """Of a saved model on the validation rows of `make_job`, computed in fp32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    add_loss_head(model)
    total = torch.zeros(3, dtype=torch.float64)
    for row in token_rows(21, seed=1):
        batch = {name: torch.tensor([row[name]]) for name in ("input_ids", "labels")}
        total += score_batch(model, batch)
    score = TokenScore.of(total)
    return {"loss": score.loss, "token_accuracy": score.accuracy}


def test_a_whole_model_is_saved_in_the_type_of_its_base_and_scored_as_it_is_saved(run):
    weights, summary = weights_of(run.model), read_json(run.summary)
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert json.loads((run.model / "config.json").read_text())["dtype"] == "bfloat16"
    assert summary["saved"] == {"dtype": "bfloat16", "asked": "bfloat16", "of_base": True}
    after = summary["eval"]["after"]
    assert after == pytest.approx(scores_of(run.model), rel=1e-6)
    in_fp32 = [json.loads(line) for line in run.metrics.read_text().splitlines()][-1]["eval/loss"]
    assert after["loss"] != pytest.approx(in_fp32, rel=1e-6)  # which would be that of other weights
    checkpoint = weights_of(run.checkpoints / "checkpoint-2")
    assert {weight.dtype for weight in checkpoint.values()} == {torch.float32}
    assert all(torch.equal(weights[name], checkpoint[name].bfloat16()) for name in weights)


def test_a_whole_model_and_its_checkpoints_stop_where_the_chat_template_ends_an_answer(run, base):
    end = AutoTokenizer.from_pretrained(base).convert_tokens_to_ids(END)
    assert GenerationConfig.from_pretrained(base).eos_token_id == 1
    for folder in (run.model, run.checkpoints / "checkpoint-2"):
        assert GenerationConfig.from_pretrained(folder).eos_token_id == [1, end]
    assert read_json(run.summary)["stop_tokens"] == {}


@pytest.mark.thorough
def test_what_a_server_of_an_adapter_must_be_told_is_in_the_summary(base, tmp_path):
    job = make_job(base, tmp_path, "lora", max_steps=1)
    train(job)
    summary = read_json(job.run.summary)
    assert summary["stop_tokens"] == {END: job.tokenizer.convert_tokens_to_ids(END)}
    assert summary["saved"] is None


@pytest.mark.thorough
def test_the_type_of_the_config_is_taken_unless_a_weight_overflows_it(base, tmp_path):
    kept = make_job(base, tmp_path, "kept", output_dtype="float32", **FULL)
    train(kept)
    assert read_json(kept.run.summary)["saved"] == {"dtype": "float32", "asked": "float32", "of_base": False}
    assert {weight.dtype for weight in weights_of(kept.run.model).values()} == {torch.float32}
    assert read_json(kept.run.summary)["eval"]["after"]["loss"] == losses(kept)[1][-1]
    large = shutil.copytree(base, tmp_path / "large")
    weights = weights_of(base)
    weights["model.embed_tokens.weight"][2] = 1e5  # of <unk>, which no row has
    save_file(weights, large / "model.safetensors", metadata={"format": "pt"})
    overflowing = make_job(large, tmp_path, "overflowing", output_dtype="float16", **FULL)
    train(overflowing)
    assert read_json(overflowing.run.summary)["saved"] == {
        "dtype": "float32",
        "asked": "float16",
        "of_base": False,
    }
    saved = weights_of(overflowing.run.model)
    assert {weight.dtype for weight in saved.values()} == {torch.float32}
    assert all(weight.isfinite().all() for weight in saved.values())


def test_the_disk_needs_room_for_the_result_in_the_type_in_which_it_is_saved(base, tmp_path):
    session = prepare_session(make_job(base, tmp_path, "room", **FULL), announce=False)
    assert weights_bytes(session) == 2 * result_bytes(session)


@pytest.mark.thorough
def test_a_command_whose_answers_fail_after_training_is_not_done(tiny_model, tmp_path, monkeypatch, capfd):
    def changed(*_):
        raise ConfigError("the base model has changed")

    config = make_workspace(tmp_path / "work", tiny_model)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = ["train", "--config", str(config), "--processes", "1", "train.max_steps=2", "train.probe=false"]
    with monkeypatch.context() as failing:
        failing.setattr("sft_play.commands.evaluate.before_after", changed)
        assert cli.main(words) == 2
    run = RunDir(config.parent / "runs" / "one")
    summary = read_json(run.summary)
    assert [summary[name] for name in ("status", "trained")] == ["failed", True]
    assert summary["error"] == "the base model has changed"
    assert summary["error"] in capfd.readouterr().err
    assert finished_weights(load_config(run.config).config, run) == run.adapter
    assert cli.main([*words, "--resume"]) == 0
    summary = read_json(run.summary)
    assert [summary[name] for name in ("status", "trained", "error")] == ["done", True, None]
    assert summary["samples"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "deepspeed_z2", "fsdp2", "deepspeed_z3"])
def test_every_engine_saves_and_scores_the_same(base, tmp_path, engine):
    train(make_job(base, tmp_path, "one", **TWO))
    launch_jobs(tmp_path, engine, 2, [{"model": str(base), "name": engine, "settings": TWO}])
    one, two = (RunDir(tmp_path / name) for name in ("one", engine))
    expected, found = weights_of(one.model), weights_of(two.model)
    assert expected.keys() == found.keys()
    for name, weight in found.items():
        assert weight.dtype == torch.bfloat16
        torch.testing.assert_close(weight, expected[name], rtol=2**-7, atol=1e-4)  # a rounding apart
    summary = read_json(two.summary)
    assert summary["saved"] == {"dtype": "bfloat16", "asked": "bfloat16", "of_base": True}
    assert summary["eval"]["after"] == pytest.approx(scores_of(two.model), rel=1e-5)


@pytest.mark.faults
@pytest.mark.parametrize(("bytes_per_second", "code"), [(1e4, 0), (1e9, 9)], ids=["large", "small"])
def test_a_large_model_has_the_time_that_a_slow_disk_takes(
    tiny_model, tmp_path, monkeypatch, bytes_per_second, code
):
    """A checkpoint of several hundred kB, for which it is waited longer than the limit, or not."""
    limit_s = 5
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("SECONDS", str(4 * limit_s))  # also more than the watcher adds
    monkeypatch.setenv("SLOW_DISK", str(bytes_per_second))
    monkeypatch.setattr(accelerate, "SCRIPT", REPOSITORY / "tests" / "integration" / "slow_disk_rank.py")
    config = make_workspace(tmp_path / "work", tiny_model)
    words = ("tuning.mode=full", "train.max_steps=2", "train.probe=false", "eval.generate=false")
    alike = ("--processes", "2", "--engine", "ddp", f"parallel.timeout_s={limit_s}")
    done = sft("train", "--config", config, *words, *alike)
    assert done.code == code, done.err
