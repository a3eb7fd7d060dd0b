"""Hub datasets: which split is read, and whether it is downloaded or streamed.

A folder stands for the repository: `datasets` reads both by the same builder.
"""

import json
import shutil

import pytest

from sft_play.config.schema import RunConfig
from sft_play.data import hub_rows, reading
from sft_play.data.hub_rows import load_hub_rows
from sft_play.data.prepare import prepare
from sft_play.data.reading import Source, fingerprint, read_rows
from sft_play.errors import DataError

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


@pytest.mark.parametrize("streaming", [True, False])
def test_rows_are_those_of_the_split_that_its_use_or_its_name_asks_for(repository, streaming):
    for split, wanted, expected in (
        ("train", None, "train"),
        ("val", None, "validation"),
        ("train", "odd", "odd"),
    ):
        source = Source("org/name", hub=load_hub_rows(repository, None, wanted, split, KEY, streaming))
        rows = list(read_rows(source))
        assert [row.data for row in rows][1] == {"question": f"{expected} 1?", "answer": "Four."}
        assert [row.where for row in rows] == [f"org/name:{number}" for number in range(1, 6)]
    with pytest.raises(DataError, match="no split test; it has train, validation, odd"):
        load_hub_rows(repository, None, None, "test", KEY, streaming)


@pytest.mark.parametrize(("free", "streams"), [(10**12, False), (100, True)])
def test_what_does_not_fit_on_the_disk_is_streamed_unless_it_is_there(
    repository, monkeypatch, capsys, free, streams
):
    usage = shutil.disk_usage(repository)
    monkeypatch.setattr(hub_rows.shutil, "disk_usage", lambda path: usage._replace(free=free))
    hub = load_hub_rows(repository, None, None, "train", KEY)
    assert (hub.count is None) == streams
    said = " ".join(capsys.readouterr().out.split())
    assert ("over the network: on the disk it would take" in said) == streams
    load_hub_rows(repository, None, None, "train", KEY, streaming=False)
    assert load_hub_rows(repository, None, None, "train", KEY).count == 5


def test_a_change_of_the_repository_changes_the_fingerprint_of_streamed_rows(repository, tmp_path):
    def found():
        return fingerprint(Source("org/name", hub=load_hub_rows(repository, None, None, "train", KEY, True)))

    before = found()
    assert found() == before and before[1] is None
    (tmp_path / "name" / "train.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    assert found()[0] != before[0]


def test_a_stream_that_breaks_names_the_row(repository):
    class Broken:
        def __iter__(self):
            yield {"text": "one"}
            raise ConnectionError("the connection was closed")

    rows = hub_rows.HubRows("org/name", Broken(), "1", None)
    with pytest.raises(DataError, match="org/name cannot be read after row 1: the connection was closed"):
        list(rows)


@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_streamed_is_prepared_as_what_is_downloaded(
    repository, make_tokenizer, monkeypatch, tmp_path, workers
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        reading, "load_hub_rows", lambda name, *more: load_hub_rows({"org/name": repository}[name], *more)
    )
    stats = {}
    for streaming in (True, False):
        monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / f"cache{streaming}"))
        data = {"train_path": "org/name", "streaming": streaming, "num_workers": workers, "limit": 4}
        config = RunConfig.model_validate({"model": {"name": "toy"}, "data": data | {"val_fraction": 0}})
        stats[streaming] = prepare(config, make_tokenizer(), progress=False).stats | {"seconds": 0}
    assert stats[True] == stats[False] and stats[True]["train"]["rows"] == 4
