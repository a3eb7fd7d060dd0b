"""Methods beside plain LoRA with AdamW, really trained: they resume bit for bit, and fit the original base."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from sft_play.choices.optimizers import OPTIMIZERS
from sft_play.extras import install_command
from sft_play.model.build import load_for_inference
from sft_play.model.layers.loss_head import TokenScore, add_loss_head, score_batch
from sft_play.runlog import read_json
from sft_play.train.run import train
from sft_play.train.session import prepare_session
from tests.integration.cli import finish, make_workspace, sft, start
from tests.jobs import NEW_TOKENS, losses, make_job, new_token_rows, tied_copy

pytestmark = pytest.mark.usefixtures("one_thread")
MANY = {"mode": "lora", "lora": {"init": "pissa", "plus_ratio": 4, "rank_pattern": {"q_proj": 4}}}
SETTINGS = dict(max_steps=6, save_steps=3, eval_steps=3, batch_size=4, learning_rate=1e-3)
NEW = {"new_tokens": NEW_TOKENS, "rows": new_token_rows(100), "val": new_token_rows(21, seed=1)}
OUTER = {"lora": {"modules_to_save": ("embed_tokens", "lm_head")}}
KINDS = {
    "pissa, LoRA+, NEFTune, lion": MANY | {"optimizer": "lion_8bit", "neftune_noise_alpha": 5.0},
    "full, adafactor": {"mode": "full", "optimizer": "adafactor"},
    "full, lion, NEFTune": {"mode": "full", "optimizer": "lion_32bit", "neftune_noise_alpha": 5.0},
    "schedule-free": {"optimizer": "schedule_free_adamw", "lr_schedule": "constant", "warmup_ratio": 0.3},
    "olora, adafactor": {"lora": {"init": "olora", "use_rslora": True}, "optimizer": "adafactor"},
    "norms": {"lora": {"modules_to_save": ("input_layernorm", "norm")}},
    "embedding and head": OUTER,
    "tied embedding and head": OUTER | {"tied": True},
    "new tokens, pissa": NEW | {"lora": {"init": "pissa"}},
    "tied new tokens, NEFTune": NEW | {"tied": True, "neftune_noise_alpha": 5.0},
    "qlora, new tokens": NEW | {"mode": "qlora"},
    "full, tied new tokens": NEW | {"tied": True, "mode": "full"},
}


@pytest.fixture
def model_of(tiny_model, tmp_path):
    """The model that a kind trains, and its other settings."""

    def of(kind: dict):
        settings = dict(kind)
        tied = settings.pop("tied", False)
        return tied_copy(tiny_model, tmp_path / "tied") if tied else tiny_model, settings

    return of


def weights(job):
    folder = job.run.model if job.config.tuning.mode == "full" else job.run.adapter
    return load_file(next(folder.glob("*.safetensors")))


def loss_of(model, rows) -> float:
    total = torch.zeros(3, dtype=torch.float64)
    for row in rows:
        batch = {name: torch.tensor([row[name]]) for name in ("input_ids", "labels")}
        total += score_batch(model, batch)
    return TokenScore.of(total).loss


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, id=name, marks=[] if number == 0 else pytest.mark.slow)
        for number, (name, kind) in enumerate(KINDS.items())
    ],
)
def test_a_run_resumes_bit_for_bit_and_its_result_fits_the_original_base(model_of, tmp_path, kind):
    if OPTIMIZERS[kind.get("optimizer", "adamw")].averages:
        pytest.importorskip("schedulefree", reason=f"run `{install_command('schedulefree')}`")
    model, kind = model_of(kind)
    whole = make_job(model, tmp_path / "whole", "run", **SETTINGS, **kind)
    train(whole)
    shutil.copytree(whole.run.path, tmp_path / "again" / "run")
    again = make_job(model, tmp_path / "again", "run", **SETTINGS, **kind, resume="auto")
    shutil.rmtree(again.run.checkpoints / "checkpoint-6")
    train(again)
    expected = weights(whole)
    assert weights(again).keys() == expected.keys()
    for name, tensor in weights(again).items():
        assert torch.equal(tensor, expected[name]), name
    assert losses(again) == losses(whole)
    assert abs(losses(whole)[1][-1] - losses(whole)[1][0]) > 1e-4
    folder = whole.run.model if kind.get("mode") == "full" else whole.run.adapter
    found = load_for_inference(whole.config, folder)
    add_loss_head(found)
    assert loss_of(found, whole.data.val) == pytest.approx(min(losses(whole)[1][1:]), rel=1e-5)


def test_lora_plus_gives_b_its_own_rate_and_every_parameter_one_group(tiny_model, tmp_path):
    kind = {"lora": MANY["lora"] | {"modules_to_save": ("norm",)}}
    job = make_job(tiny_model, tmp_path, "run", **kind, weight_decay=0.1, learning_rate=1e-3)
    trainer = prepare_session(job).trainer
    trainer.create_optimizer_and_scheduler(10)
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    groups = trainer.optimizer.param_groups
    assert [group["initial_lr"] for group in groups] == [1e-3, 1e-3, pytest.approx(4e-3)]
    assert [group["weight_decay"] for group in groups] == [0.1, 0, 0.1]
    for group, kind in zip(groups, ("lora_A", "model.norm", "lora_B"), strict=True):
        assert group["params"] and all(kind in names[id(p)] for p in group["params"])
    trained = sum(parameter.requires_grad for parameter in trainer.model.parameters())
    assert sum(len(group["params"]) for group in groups) == trained


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "deepspeed_z2"])
def test_two_processes_learn_what_one_does_and_another_engine_goes_on(tiny_model, tmp_path, engine):
    config = make_workspace(tmp_path, tiny_model)
    words = [
        "--config", config, "eval.generate=false", "train.probe=false", "train.max_steps=8",
        "train.save_steps=4", "train.eval_steps=4", "tuning.lora.init=pissa", "tuning.lora.plus_ratio=4",
        "train.learning_rate=1e-3",
    ]  # fmt: skip
    assert sft("train", *words, "output.name=alone").code == 0
    two = finish(
        start("train", "--processes", "2", "--engine", engine, *words, "output.name=two"), timeout_s=200
    )
    assert two.code == 0, two.err
    shutil.copytree(tmp_path / "runs" / "two", tmp_path / "runs" / "moved")
    shutil.rmtree(tmp_path / "runs" / "moved" / "checkpoints" / "checkpoint-8")
    assert sft("train", "--resume", *words, "output.name=moved").code == 0
    found = [read_json(tmp_path / "runs" / name / "summary.json") for name in ("alone", "two", "moved")]
    assert found[1]["world_size"] == 2 and found[2]["world_size"] == 1
    for other in found[1:]:
        assert other["train_loss"] == pytest.approx(found[0]["train_loss"], rel=2e-5)
        assert other["eval"]["after"]["loss"] == pytest.approx(found[0]["eval"]["after"]["loss"], rel=2e-5)
