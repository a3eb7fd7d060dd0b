"""Flags of the command line beside overrides of the config."""

import pytest

from sft_play.cli import parse
from sft_play.commands.plan_flags import Asked
from sft_play.commands.train import with_flags
from sft_play.config.load import load_config
from sft_play.errors import ConfigError
from tests.conftest import REPOSITORY

CONFIG = str(REPOSITORY / "configs" / "demo.yaml")


@pytest.mark.parametrize(
    ("overrides", "engine", "resume", "added"),
    [
        ([], None, False, []),
        ([], "ddp", True, ["parallel.engine=ddp", "train.resume=auto"]),
        (["train.epochs=2"], None, True, ["train.resume=auto"]),
        (["train.resume=runs/a/checkpoint-4"], None, True, []),
        (["parallel.engine=ddp"], "ddp", False, ["parallel.engine=ddp"]),
        (["parallel.engine=deepspeed_z2"], None, False, []),
    ],
)
def test_a_flag_is_an_override_unless_one_says_more(overrides, engine, resume, added):
    resolved = with_flags(load_config(CONFIG, overrides), engine, resume)
    assert resolved.overrides == (*overrides, *added)


def test_a_checkpoint_in_the_file_gives_way_to_the_latest_one(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(f"include: {CONFIG}\ntrain:\n  resume: old/checkpoint-4\n")
    assert with_flags(load_config(config), None, True).config.train.resume == "auto"


@pytest.mark.parametrize(
    ("override", "engine", "resume", "said"),
    [
        ("train.resume=never", None, True, "contradicts `make resume`"),
        ("parallel.engine=deepspeed_z2", "ddp", False, "contradicts --engine ddp"),
        ("parallel.engine=auto", "ddp", False, "contradicts --engine ddp"),
    ],
)
def test_a_flag_that_an_override_contradicts_is_refused(override, engine, resume, said):
    with pytest.raises(ConfigError, match=said):
        with_flags(load_config(CONFIG, [override]), engine, resume)


@pytest.mark.parametrize("words", [["--json"], ["--output", "answers.jsonl"]])
def test_a_chat_writes_no_results(words):
    with pytest.raises(ConfigError, match="a chat writes no results; name a file of prompts, IN=<file>"):
        parse(["infer", "--config", CONFIG, *words]).run()


@pytest.mark.parametrize("typed", ["2x RTX 3090", "2 x RTX 3090", "2X RTX 3090", "2\u00d7RTX 3090"])
def test_the_number_of_gpus_may_stand_before_their_name(typed):
    asked = Asked.of(parse(["plan", "--model", "tiny", "--gpu", typed]))
    assert (asked.gpu, asked.gpus) == ("RTX 3090", 2)
    assert Asked.of(parse(["plan", "--gpu", typed, "--gpus", "2"])).gpus == 2
    with pytest.raises(ConfigError, match=r'asks for 2 and NGPU=4 for 4; .*GPU="RTX 3090" NGPU=2'):
        Asked.of(parse(["plan", "--gpu", typed, "--gpus", "4"]))


def test_a_name_without_a_number_of_gpus_is_left_alone():
    for name in ("4090", "0x RTX 3090"):
        asked = Asked.of(parse(["plan", "--gpu", name]))
        assert (asked.gpu, asked.gpus) == (name, None)
