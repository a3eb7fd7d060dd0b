"""Checkpoints of real runs: whole or not there, verified before they are loaded, and of the same run."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from sft_play.config.schema import ModelConfig
from sft_play.errors import CheckpointError, ConfigError, NonFiniteError, StorageError
from sft_play.manifest import MANIFEST, files_in, find_damage, read_manifest
from sft_play.model.weights.finished import finished_weights
from sft_play.runlog import read_json
from sft_play.train import run as run_module
from sft_play.train.checkpoints import find_problem
from sft_play.train.ranks import process_group
from sft_play.train.run import train
from tests.jobs import losses, make_job, seal
from tests.unit.test_manifest import flip_bit
from tests.unit.train.test_checkpoints import Payload

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]

SETTINGS = dict(max_steps=6, save_steps=2, eval_steps=2, batch_size=4, keep_checkpoints=2)


@pytest.fixture(scope="module")
def whole(tiny_model, tmp_path_factory):
    """An uninterrupted run."""
    job = make_job(tiny_model, tmp_path_factory.mktemp("whole"), "run", **SETTINGS)
    train(job)
    return job


@pytest.fixture
def again(whole, tiny_model, tmp_path):
    """A copy of the run, to be spoilt and resumed: `again(**train settings)` is its job."""
    shutil.copytree(whole.run.path, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "adapter")

    def job(**changes):
        return make_job(tiny_model, tmp_path, "run", **{**SETTINGS, "resume": "auto", **changes})

    return job


def weights(job):
    return load_file(job.run.adapter / "adapter_model.safetensors")


def assert_same_weights(job, whole):
    expected = weights(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(job).items())


def test_what_is_saved_is_whole_and_complete(whole):
    run = whole.run
    kept = {path.name for path in run.checkpoints.iterdir() if path.is_dir()}
    best = read_json(run.summary)["best_checkpoint"]
    assert kept == {"checkpoint-4", "checkpoint-6", best.rpartition("/")[2]}
    assert best.startswith(str(run.checkpoints / "checkpoint-"))
    for folder in (*run.checkpoints.glob("checkpoint-*"), run.adapter):
        assert find_damage(folder) is None
        assert set(read_manifest(folder)["files"]) == set(files_in(folder))
    manifest = read_manifest(run.checkpoints / "checkpoint-6")
    assert (manifest["step"], manifest["engine"], manifest["world_size"]) == (6, "none", 1)
    assert manifest["versions"]["torch"] and manifest["settings"]["train.learning_rate"] == 5e-3
    assert not list(run.path.rglob("training_args.bin"))


def test_a_flipped_bit_in_any_file_of_a_checkpoint_is_noticed(whole, tmp_path):
    checkpoint = tmp_path / "checkpoint-6"
    shutil.copytree(whole.run.checkpoints / "checkpoint-6", checkpoint)
    names = [*files_in(checkpoint), MANIFEST]
    assert len(names) > 8 and find_problem(checkpoint) is None
    for name in names:
        content = (checkpoint / name).read_bytes()
        flip_bit(checkpoint / name, len(content) // 2)
        assert find_problem(checkpoint), name
        (checkpoint / name).write_bytes(content[: len(content) // 2])
        assert find_problem(checkpoint), name
        (checkpoint / name).write_bytes(content)
    assert find_problem(checkpoint) is None


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "optimizer.pt"])
def test_a_damaged_checkpoint_is_set_aside_and_the_run_ends_as_if_nothing_had_been(
    again, whole, name, capsys
):
    job = again()
    flip_bit(job.run.checkpoints / "checkpoint-6" / name, 100)
    train(job)
    said = " ".join(capsys.readouterr().out.split())
    assert f"checkpoint-6 is damaged: {name} has changed" in said and "resuming from" in said
    assert find_damage(job.run.checkpoints / "checkpoint-6") is None
    assert (job.run.checkpoints / "checkpoint-6.damaged").is_dir()
    assert_same_weights(job, whole)
    assert losses(job) == losses(whole)


def test_with_all_checkpoints_damaged_no_model_is_loaded(again, monkeypatch):
    job = again()
    for checkpoint in job.run.checkpoints.glob("checkpoint-*"):
        flip_bit(checkpoint / "optimizer.pt", 50)
    monkeypatch.setattr("sft_play.train.session.build_model", None)
    for _ in range(2):
        with pytest.raises(
            CheckpointError, match="(?s)no checkpoint is left to resume from.*make train"
        ) as error:
            train(job)
        assert error.value.exit_code == 8


@pytest.mark.thorough
def test_a_payload_in_a_checkpoint_does_not_run_and_the_one_before_is_taken(again, whole, tmp_path):
    job, canary = again(), tmp_path / "canary"
    checkpoint = job.run.checkpoints / "checkpoint-6"
    torch.save({"state": Payload(canary)}, checkpoint / "optimizer.pt")
    seal(checkpoint)
    train(job)
    assert not canary.exists() and (job.run.checkpoints / "checkpoint-6.damaged").is_dir()
    assert_same_weights(job, whole)


def test_a_checkpoint_of_an_earlier_version_is_resumed_with_a_warning(again, whole, capsys):
    job = again()
    shutil.rmtree(job.run.checkpoints / "checkpoint-6")
    (job.run.checkpoints / "checkpoint-4" / MANIFEST).unlink()
    train(job)
    assert "checkpoint-4 has no manifest" in " ".join(capsys.readouterr().out.split())
    assert_same_weights(job, whole)


def test_a_run_resumed_at_an_earlier_step_sets_the_later_ones_aside(again, whole, capsys):
    job = again()
    train(replace(job, resolved=again(resume=str(job.run.checkpoints / "checkpoint-4")).resolved))
    said = " ".join(capsys.readouterr().out.split())
    assert "checkpoint-6.stale: set aside, since the run resumes from checkpoint-4" in said
    assert (job.run.checkpoints / "checkpoint-6.stale").is_dir()
    assert_same_weights(job, whole)


def test_a_base_that_has_changed_since_the_run_began_is_refused(again, whole, tiny_model, tmp_path):
    base = shutil.copytree(tiny_model, tmp_path / "other" / tiny_model.name)
    job = again()
    shutil.copytree(whole.run.adapter, job.run.adapter)
    config = job.config.model_copy(update={"model": ModelConfig(name=str(base))})  # moved, but the same
    assert finished_weights(config, job.run) == job.run.adapter
    flip_bit(base / "model.safetensors")
    said = "model.safetensors in .* is not the one that run was trained with"
    with pytest.raises(ConfigError, match=said):
        finished_weights(config, job.run)
    with pytest.raises(ConfigError, match=said):
        train(replace(job, resolved=replace(job.resolved, config=config)))


@pytest.mark.thorough
def test_another_learning_rate_is_refused_and_if_allowed_it_counts(again, tiny_model, tmp_path):
    job = again(learning_rate=1e-3)
    shutil.rmtree(job.run.checkpoints / "checkpoint-6")
    with pytest.raises(
        ConfigError, match=r"train.learning_rate: 0.005 -> 0.001\n.*ALLOW=train.learning_rate"
    ):
        train(job)
    train(again(learning_rate=1e-3, allow_changed=["train.learning_rate"]))
    lower = make_job(tiny_model, tmp_path, "lower", **{**SETTINGS, "learning_rate": 1e-3})
    train(lower)
    rates = [
        [json.loads(line).get("train/learning_rate") for line in run.metrics.read_text().splitlines()][-3:]
        for run in (job.run, lower.run)
    ]
    assert rates[0] == rates[1]
    manifest = read_manifest(job.run.checkpoints / "checkpoint-6")
    assert manifest["settings"]["train.learning_rate"] == 1e-3


def test_a_damaged_best_checkpoint_is_not_published(again, whole, capsys, monkeypatch):
    job = again()
    shutil.rmtree(job.run.checkpoints / "checkpoint-6")
    for checkpoint in list(job.run.checkpoints.glob("checkpoint-*")):
        state = json.loads((checkpoint / "trainer_state.json").read_text())
        state |= {
            "best_metric": 0.0,
            "best_global_step": 2,
            "best_model_checkpoint": "elsewhere/checkpoint-2",
        }
        (checkpoint / "trainer_state.json").write_text(json.dumps(state))
        seal(checkpoint)
    best = job.run.checkpoints / "checkpoint-2"
    if not best.exists():
        shutil.copytree(job.run.checkpoints / "checkpoint-4", best)
    flip_bit(best / "adapter_model.safetensors", -5)
    train(job)
    assert "is damaged: adapter_model.safetensors has changed" in " ".join(capsys.readouterr().out.split())
    assert read_json(job.run.summary)["best_checkpoint"] is None
    last = load_file(job.run.checkpoints / "checkpoint-6" / "adapter_model.safetensors")
    assert all(torch.equal(tensor, last[name]) for name, tensor in weights(job).items())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("weight", "the trained weight .*lora_A.* is NaN or infinite"),
        ("moment", "the optimizer's exp_avg_sq of .*lora_A.* is NaN or infinite"),
    ],
)
def test_a_checkpoint_is_never_written_with_values_that_are_not_finite(tiny_model, tmp_path, broken, said):
    job = make_job(tiny_model, tmp_path, "run", **SETTINGS)
    real, saves = run_module.prepare_session, []

    def prepare(*args, **kwargs):
        session = real(*args, **kwargs)
        save = session.trainer._save_checkpoint

        def spoil_at_the_second(model, trial):
            saves.append(1)
            if len(saves) == 2:
                weight = next(weight for weight in model.parameters() if weight.requires_grad)
                moment = session.trainer.optimizer.state[weight]["exp_avg_sq"]
                (weight.data if broken == "weight" else moment)[0, 0] = math.inf
            save(model, trial)

        session.trainer._save_checkpoint = spoil_at_the_second
        return session

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "prepare_session", prepare)
        with pytest.raises(NonFiniteError, match=said):
            train(job)
    assert [path.name for path in job.run.checkpoints.glob("checkpoint-*")] == ["checkpoint-2"]
    assert not job.run.adapter.exists()


def test_a_run_directory_that_is_deleted_or_closed_while_training_is_an_error_of_the_disk(
    tiny_model, tmp_path
):
    job = make_job(tiny_model, tmp_path, "run", **{**SETTINGS, "eval_steps": 6, "save_steps": 6})
    real = run_module.clear_way

    def delete(*args):
        real(*args)
        shutil.rmtree(job.run.checkpoints, ignore_errors=True)
        job.run.checkpoints.write_text("a file where the folder was")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "clear_way", delete)
        with pytest.raises(StorageError, match="cannot write to .*run: .*make resume"):
            train(job)


@pytest.mark.parametrize("offload", ["ram", "none"])
def test_a_divided_mixture_goes_on_from_its_weights_whose_files_have_other_names(
    tiny_model, tmp_path, offload
):
    """A checkpoint has them by the names of parameters, by which engines that divide weights ask for them."""
    base = shutil.copytree(tiny_model, tmp_path / "base")
    sizes = {key: value for key, value in read_json(base / "config.json").items() if key.endswith("_size")}
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, num_hidden_layers=2)
    config = Qwen3MoeConfig(**sizes, **experts, head_dim=16, num_attention_heads=4, num_key_value_heads=2)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(base)
    settings = dict(mode="full", max_steps=4, save_steps=2, eval_steps=2, batch_size=8, learning_rate=1e-3)
    job = make_job(base, tmp_path, "divided", **settings, offload="ram")
    with process_group(job):
        train(job)
    assert "model.layers.0.mlp.experts.0.up_proj.weight" in load_file(job.run.model / "model.safetensors")
    checkpoint = str(job.run.checkpoints / "checkpoint-2")
    again = make_job(base, tmp_path, "again", **settings, offload=offload, resume=checkpoint)
    with process_group(again):
        train(again)
    assert losses(again)[0] == pytest.approx(losses(job)[0][2:], rel=1e-6)
