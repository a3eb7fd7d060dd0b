"""The Python API takes what people have at hand, or says what it takes."""

from pathlib import Path

import pytest

import sft_play.api as sft
from sft_play.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["train.epochs=2"], r"settings: expected a dict by dotted name, .* \(found a list\)"),
        ("train.epochs=2", r"\(found a str\)"),
        ({"train.epochs": object()}, "settings: train.epochs is of type object; expected a number"),
        ({"data.train_path": {"path": {1, 2}}}, "settings: data.train_path is of type dict; expected"),
        ({5: 5}, "override '5=5' does not have the form"),
    ],
)
def test_settings_that_cannot_be_typed_are_config_errors(settings, said):
    for command in (sft.plan, sft.train):
        with pytest.raises(ConfigError, match=said):
            command(config="configs/demo.yaml", settings=settings)


def test_settings_become_what_would_be_typed():
    settings = {
        "data.train_path": Path("a b/c.jsonl"),
        "train.epochs": 2,
        "train.grad_accum": None,
        "train.probe": True,
    }
    assert sft._overrides(settings) == [
        'data.train_path="a b/c.jsonl"', "train.epochs=2", "train.grad_accum=null", "train.probe=true",
    ]  # fmt: skip
    assert sft._overrides(None) == sft._overrides({}) == []
