"""The names that the guide for users of other tools gives are settings of ours, and what errors answer."""

import re

import pytest

from sft_play.config.aliases import ALIASES
from sft_play.config.load import load_config
from sft_play.config.schema import RunConfig
from tests.conftest import REPOSITORY

PAGE = (REPOSITORY / "docs/guides/coming-from.md").read_text()
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| `")
]
TICKED = re.compile(r"`([^`]+)`")
SECTIONS = tuple(f"{name}." for name in RunConfig.model_fields)


def ours(cell: str) -> list[str]:
    return [text for text in TICKED.findall(cell) if text.startswith(SECTIONS)]


def test_there_is_a_table_for_each_tool():
    tools = ["TRL", "Axolotl", "LLaMA-Factory", "Unsloth"]
    assert re.findall(r"^## (.*)", PAGE, re.MULTILINE)[1:-1] == tools
    assert len(ROWS) > 60


@pytest.mark.parametrize("theirs, here, differs", ROWS, ids=[row[0][:40] for row in ROWS])
def test_what_is_named_can_be_set(tmp_path, theirs, here, differs):
    named = ours(here) + ours(differs)
    typed = [text for text in TICKED.findall(here + differs) if text.startswith("make ")]
    assert named or typed or not here
    (tmp_path / "run.yaml").write_text("model: {name: m}\ndata: {train_path: rows.jsonl}\n")
    for setting in named:
        if "=" in setting:
            others = ["model.rope_scaling.factor=4"] if "rope" in setting else []
            others += (
                ["model.rope_scaling.rope_type=yarn"]
                if setting.startswith("model.rope_scaling.factor")
                else []
            )
            load_config(tmp_path / "run.yaml", [setting, *others])
        else:
            require_setting(setting)


def require_setting(name: str) -> None:
    fields = RunConfig.model_fields
    for part in name.split(".")[:-1]:
        fields = fields[part].annotation.model_fields
    assert name.rpartition(".")[2] in fields, name


def test_errors_answer_with_the_same_names():
    told = {alias: name.partition("=")[0] for alias, name in ALIASES.items()}
    compared = 0
    for theirs, here, _ in ROWS:
        words = {word for text in TICKED.findall(theirs) for word in re.findall(r"\w+", text)}
        names = {name.partition("=")[0] for name in ours(here)}
        for word in words & told.keys():
            allowed = names | (
                {"train.batch_size", "train.grad_accum"} if "train.effective_batch_size" in names else set()
            )
            assert told[word] in allowed, word
            compared += 1
    assert compared > 20
