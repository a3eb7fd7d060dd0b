"""Flags of the command line beside overrides of the config."""

import pytest

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
