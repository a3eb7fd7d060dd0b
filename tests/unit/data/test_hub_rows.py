"""Hub datasets: which split is read, and whether it is downloaded or streamed.

A folder stands for the repository: `datasets` reads both by the same builder.
"""

import json
import shutil

import datasets
import pytest

from sft_play.config.schema import RunConfig
from sft_play.data import hub_rows, sources
from sft_play.data.hub_rows import HubRows, load_hub_rows
from sft_play.data.inventory import UNUSED, inventory
from sft_play.data.prepare import prepare
from sft_play.data.reading import read_rows
from sft_play.data.sources import fingerprint, open_inputs, open_source
from sft_play.errors import DataError
from tests.pictures import drawn, encoded

KEY = "data.train_path"


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """The path of a dataset with three splits, one of them called `odd`."""
    folder = tmp_path / "name"
    folder.mkdir()
    for split in ("train", "validation", "odd"):
        rows = [{"question": f"{split} {number}?", "answer": "Four.", "extra": None} for number in range(5)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = "".join(
        f"  - {{split: {split}, path: {split}.jsonl}}\n" for split in ("train", "validation", "odd")
    )
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files:\n{files}---\n")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return str(folder)


def first(source):
    return next(iter(read_rows(source))).data["question"]


@pytest.fixture
def as_org_name(repository, monkeypatch):
    """Makes the repository that of the Hub dataset org/name."""
    monkeypatch.setattr(
        sources, "load_hub_rows", lambda name, *more: load_hub_rows({"org/name": repository}[name], *more)
    )


@pytest.mark.parametrize("streaming", [True, False])
def test_rows_are_those_of_the_split_that_its_use_or_its_name_asks_for(as_org_name, streaming):
    for split, path, wanted, expected in (
        ("train", "org/name", None, "train"),
        ("val", "org/name", None, "validation"),
        ("train", "org/name", "odd", "odd"),
        ("test", "org/name::odd", None, "odd"),
    ):
        rows = list(read_rows(open_source(path, split, wanted=wanted, streaming=streaming)))
        assert [row.data for row in rows][1] == {"question": f"{expected} 1?", "answer": "Four."}
        assert [row.where for row in rows] == [f"{path}:{number}" for number in range(1, 6)]
    said = "no split test or .*; it has train, validation, odd. Choose one: org/name::<split>"
    with pytest.raises(DataError, match=said):
        open_source("org/name", "test", streaming=streaming)


@pytest.mark.parametrize(("free", "streams"), [(10**12, False), (100, True)])
def test_what_does_not_fit_on_the_disk_is_streamed_unless_it_is_there(
    repository, monkeypatch, capsys, free, streams
):
    usage = shutil.disk_usage(repository)
    monkeypatch.setattr(hub_rows.shutil, "disk_usage", lambda path: usage._replace(free=free))
    hub = load_hub_rows(repository, None, KEY)["train"]
    assert (hub.count is None) == streams
    said = " ".join(capsys.readouterr().out.split())
    assert ("over the network: a download takes" in said) == streams
    load_hub_rows(repository, None, KEY, streaming=False)
    assert load_hub_rows(repository, None, KEY)["train"].count == 5


def test_a_change_of_the_repository_changes_the_fingerprint_of_streamed_rows(as_org_name, tmp_path):
    def found():
        return fingerprint(open_source("org/name", "train", streaming=True))

    before = found()
    assert found() == before and before[1] is None
    (tmp_path / "name" / "train.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    assert found()[0] != before[0]


def test_a_stream_that_breaks_names_the_row():
    def broken():
        yield from ({"text": "one"} for _ in range(40))
        raise ConnectionError("the connection was closed")

    stream = datasets.IterableDataset.from_generator(broken)
    rows = hub_rows.HubRows("org/name", stream, "1", None)
    with pytest.raises(DataError, match="org/name cannot be read after row 40: the connection was closed"):
        list(rows)


@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_streamed_is_prepared_as_what_is_downloaded(
    as_org_name, make_tokenizer, monkeypatch, tmp_path, workers
):
    monkeypatch.chdir(tmp_path)
    stats = {}
    for streaming in (True, False):
        monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / f"cache{streaming}"))
        data = {"train_path": "org/name", "streaming": streaming, "num_workers": workers, "limit": 4}
        config = RunConfig.model_validate({"model": {"name": "toy"}, "data": data | {"val_fraction": 0}})
        stats[streaming] = prepare(config, make_tokenizer(), progress=False).stats | {"seconds": 0}
    assert stats[True] == stats[False] and stats[True]["train"]["rows"] == 4


def test_a_validation_split_is_validation_data_unless_the_config_names_other_rows(as_org_name, write_rows):
    def found(**data):
        config = RunConfig.model_validate({"model": {"name": "toy"}, "data": data})
        opened = open_inputs(config.data)
        return [(given.split, source.split) for given, source in opened], inventory(opened).remarks

    unused = {"org/name": {UNUSED: ["odd"]}}
    assert found(train_path="org/name") == ([("train", "train"), ("val", "validation")], unused)
    assert found(train_path="org/name", val_path="org/name") == found(train_path="org/name")
    assert found(train_path="org/name::train") == ([("train", "train")], {})
    own = str(write_rows([{"question": "q", "answer": "a"}]))
    unused = {"org/name": {UNUSED: ["validation", "odd"]}}
    assert found(train_path="org/name", val_path=own) == ([("train", "train"), ("val", "")], unused)
    assert found(sources=[{"path": "org/name", "split": "odd"}]) == ([("train", "odd")], {})


@pytest.mark.parametrize("streams", [False, True])
def test_images_are_not_decoded(streams):
    content = encoded(drawn(9, 9))
    features = datasets.Features(
        {"question": datasets.Value("string"), "images": datasets.List(datasets.Image())}
    )
    rows = datasets.Dataset.from_dict(
        {"question": ["q"] * 3, "images": [[{"bytes": content, "path": None}]] * 3}, features
    )
    source = rows.to_iterable_dataset() if streams else rows
    found = list(HubRows("org/name", source, "1", 3))
    assert [row["images"][0]["bytes"] for row in found] == [content] * 3


@pytest.mark.skipif(not hasattr(datasets, "Json"), reason="needs a datasets that stores JSON of any type")
def test_columns_of_values_of_many_types_are_read_as_json(tmp_path, monkeypatch):
    """Calls of tools with other arguments in each row, which `datasets` stores as text."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    written = [{"question": "q", "call": {"a": 1}}, {"question": "q", "call": {"a": "x", "b": [1, "y"]}}]
    (tmp_path / "name").mkdir()
    (tmp_path / "name" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    for streaming in (True, False):
        rows = load_hub_rows(str(tmp_path / "name"), None, "data.train_path", streaming)["train"]
        assert [row["call"] for row in rows] == [row["call"] for row in written]
