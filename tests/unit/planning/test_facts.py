"""The sizes of rows are known the second time, unless anything that they depend on has changed."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from sft_play.config.schema import RunConfig
from sft_play.model import load as model_load
from sft_play.planning.rows.facts import DataFacts, data_facts
from sft_play.sizing.facts.architecture import planning_architecture


@pytest.fixture
def tree(tiny_model, tmp_path, monkeypatch):
    """Settings of a run, with a model and data that can be changed."""
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    model = shutil.copytree(tiny_model, tmp_path / "model")
    for split, count in (("train", 12), ("val", 3)):
        rows = ({"prompt": f"w{row} w1", "completion": "w2 " * (row + 1)} for row in range(count))
        (tmp_path / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "own.jinja").write_text(
        json.loads((model / "tokenizer_config.json").read_text()).get("chat_template")
        or (model / "chat_template.jinja").read_text()
    )
    return {
        "model": {"name": str(model)},
        "data": {"train_path": str(tmp_path / "train.jsonl"), "val_path": str(tmp_path / "val.jsonl")},
    }


def facts(tree) -> DataFacts:
    config = RunConfig.model_validate(tree)
    return data_facts(config, planning_architecture(config.model)[0], progress=False)


def same(one: DataFacts, other: DataFacts) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(vars(one).values(), vars(other).values(), strict=True))


@pytest.fixture
def loads(monkeypatch):
    """How often data was loaded."""
    calls, load = [], model_load.load_data
    monkeypatch.setattr(model_load, "load_data", lambda *a, **k: calls.append(a) or load(*a, **k))
    return calls


def test_the_second_time_nothing_is_loaded_and_the_facts_are_the_same(tree, loads):
    first = facts(tree)
    assert first.seen and len(first.lengths) == 12 and len(first.eval_lengths) == 3
    assert same(facts(tree), first) and len(loads) == 1
    packed = {
        **tree,
        "train": {"packing": True, "effective_batch_size": 256},
        "model": tree["model"] | {"max_seq_len": 64},
    }
    assert same(facts(packed), facts(packed)) and len(loads) == 2


def append(path, text):
    with Path(path).open("a") as file:
        file.write(text)


CHANGES = {
    "a training row": lambda tree: append(tree["data"]["train_path"], '{"prompt": "w5", "completion": "w6"}\n'),
    "a validation row": lambda tree: append(tree["data"]["val_path"], '{"prompt": "w5", "completion": "w6"}\n'),
    "a file of the tokenizer": lambda tree: append(f"{tree['model']['name']}/tokenizer.json", " "),
    "the config of the model": lambda tree: append(f"{tree['model']['name']}/config.json", " "),
    "the limit of a row": lambda tree: tree["model"].update(max_seq_len=16),
    "what is learned": lambda tree: tree["data"].update(supervise="all"),
    "the share that is held out": lambda tree: tree["data"].update(test_fraction=0.2),
    "the seed": lambda tree: tree.update(train={"seed": 5}),
    "the name of the template": lambda tree: tree["data"].update(chat_template="plain"),
}  # fmt: skip


def test_whatever_changes_is_loaded_again(tree, loads):
    facts(tree)
    for number, (change, make) in enumerate(CHANGES.items(), 2):
        make(tree)
        assert facts(tree).seen
        assert len(loads) == number, change


def test_a_changed_template_is_loaded_again(tree, loads, tmp_path):
    tree["data"]["chat_template"] = str(tmp_path / "own.jinja")
    facts(tree)
    append(tmp_path / "own.jinja", "{# changed #}")
    facts(tree)
    assert len(loads) == 2


def test_without_data_there_are_assumptions_also_the_second_time(tree, loads):
    tree["data"]["train_path"] = "no/such.jsonl"
    assert not facts(tree).seen and not facts(tree).seen and not loads


def test_rows_that_cannot_be_used_are_refused_every_time(tree, loads):
    Path(tree["data"]["train_path"]).write_text('{"prompt": 3}\n')
    assert not facts(tree).seen and not facts(tree).seen and len(loads) == 2
