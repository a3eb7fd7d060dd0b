"""Methods that exclude each other are refused in one sentence, and patterns are settings like all others."""

import sys

import pytest
from pydantic import ValidationError

from sft_play.config.load import dump_resolved, load_config
from sft_play.config.methods import lighter_modes
from sft_play.config.resolved import read_resolved
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.machine.host import missing_packages
from sft_play.plan import Device
from sft_play.planning.candidates.drafts import require_possible
from sft_play.spelling import BY_MAKE

CPU, GPU = Device(kind="cpu", name="the CPU", bf16=True), Device(kind="cuda", name="an H100", bf16=True)


def tree(mode="lora", lora=None, engine="auto", **train) -> dict:
    return {
        "model": {"name": "any"},
        "data": {"train_path": "any"},
        "tuning": {"mode": mode, "lora": lora or {}},
        "train": train,
        "parallel": {"engine": engine},
    }


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(mode="qlora", lora={"init": "pissa"}), "4-bit with tuning.mode=qlora; set it to lora"),
        (dict(lora={"init": "olora", "use_dora": True}), "both decompose the base weights; use one"),
        (dict(mode="full", lora={"plus_ratio": 16}), "tuning.lora has no effect with tuning.mode=full"),
        (dict(lora={"plus_ratio": 0.5}), "greater than or equal to 1"),
        (dict(lora={"rank_pattern": {"q_proj": 0}}), "greater than 0"),
        (dict(lora={"rank_pattern": {"q_(proj": 4}}), "not a regular expression"),
        (dict(neftune_noise_alpha=-5), "greater than 0"),
        (dict(neftune_noise_alpha=5, padding_free=True), "train.padding_free=true joins rows, and NEFTune"),
        (dict(neftune_noise_alpha=5, packing=True), "train.packing=true joins rows, and NEFTune"),
        (dict(optimizer="lion"), "lion_32bit"),
        (dict(optimizer="schedule_free_adamw"), "set train.lr_schedule=constant"),
    ],
)
def test_what_excludes_each_other_is_refused_in_one_sentence(settings, words):
    with pytest.raises(ValidationError) as refused:
        RunConfig.model_validate(tree(**settings))
    assert len(refused.value.errors()) == 1
    assert words in str(refused.value)


def test_states_are_paged_on_a_gpu_only():
    for name, instead in (("paged_adamw_32bit", "adamw"), ("paged_lion_8bit", "lion_8bit")):
        config = RunConfig.model_validate(tree(optimizer=name))
        require_possible(config, GPU)
        with pytest.raises(ConfigError, match=f"this is the CPU; use {instead}$"):
            require_possible(config, CPU)


def test_a_mode_that_a_method_excludes_is_neither_planned_nor_proposed():
    config = RunConfig.model_validate(tree(lora={"init": "pissa"}))
    four_bit = config.model_copy(update={"tuning": config.tuning.model_copy(update={"mode": "qlora"})})
    with pytest.raises(ConfigError, match="4-bit"):
        require_possible(four_bit, GPU)
    assert lighter_modes("lora", "pissa") == [] and lighter_modes("lora", "default") == ["qlora"]


def test_bitsandbytes_is_needed_by_its_optimizers_only(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    def missing(optimizer):
        config = RunConfig.model_validate(tree(optimizer=optimizer, report_to=[]))
        return [text for text in missing_packages(config) if "bitsandbytes" in text]

    assert missing("lion_32bit") == ["train.optimizer=lion_32bit needs bitsandbytes, which is not installed"]
    assert missing("adafactor") == missing("adamw") == []


def test_each_missing_package_comes_with_a_command_that_installs_it(monkeypatch):
    monkeypatch.delenv(BY_MAKE, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = RunConfig.model_validate(tree(optimizer="lion_32bit", report_to=["wandb"]))
    assert list(missing_packages(config).values()) == [
        "run `pip install <the wheel of SFT-Play>`",
        f'run `{sys.executable} -m pip install "wandb<1,>=0.31"`',
    ]
    monkeypatch.setenv(BY_MAKE, "1")
    assert list(missing_packages(config).values())[1] == "run `make install EXTRAS=wandb`"


def test_a_pattern_keeps_its_origin_and_its_names(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {name: any}\ndata: {train_path: any}\ntuning: {lora: {rank_pattern: {'layers.0.+q_proj': 4}}}\n"
    )
    found = load_config(file, ["tuning.lora.alpha_pattern={k_proj: 8}", "tuning.lora.alpha_pattern.v_proj=9"])
    assert found.origins["tuning.lora.rank_pattern"] == str(file)
    assert found.origins["tuning.lora.alpha_pattern"] == "override"
    text = dump_resolved(found)
    (tmp_path / "again.yaml").write_text(text)
    again = load_config(tmp_path / "again.yaml").config
    assert again.tuning == found.config.tuning
    assert again.tuning.lora.rank_pattern == {"layers.0.+q_proj": 4}
    assert again.tuning.lora.alpha_pattern == {"k_proj": 8, "v_proj": 9}
    assert read_resolved(tmp_path / "again.yaml")["tuning.lora.alpha_pattern"].value == {
        "k_proj": 8,
        "v_proj": 9,
    }
    assert load_config(tmp_path / "again.yaml", ["tuning.lora.rank_pattern={}"]).config.tuning.lora.r == 16
