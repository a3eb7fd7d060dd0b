"""Folders of data: what is read of them, as which split, and that nothing is left out without a word."""

import io
import json

import pytest
from rich.console import Console

from sft_play.commands.check import WARNING, data_findings
from sft_play.config.schema import RunConfig
from sft_play.data import show
from sft_play.data.folders import (
    ABOUT,
    BESIDE,
    DOCUMENTS,
    EMPTY,
    NO_SPLIT,
    OTHER,
    SPLIT_NAMES,
    UNNAMED,
    WORD_ENDS,
    read_folder,
)
from sft_play.data.prepare import prepare
from sft_play.data.reading import read_rows
from sft_play.data.sources import open_inputs, open_source
from sft_play.errors import DataError

pytestmark = pytest.mark.usefixtures("own_cache")

KEY = "data.train_path"


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "data-set"
    made.mkdir()
    return made


def rows(count, word="What"):
    return [{"question": f"{word} is {i}?", "answer": f"It is {i}."} for i in range(count)]


def write(folder, *names, count=1):
    """Files whose rows say their name; Parquet, CSV, JSON lines, or anything else as text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows(count, name)), file)
        elif file.suffix == ".csv":
            file.write_text("question,answer\n" + "".join(f"{name} is {i}?,a\n" for i in range(count)))
        elif file.suffix == ".jsonl":
            file.write_text("".join(json.dumps(row) + "\n" for row in rows(count, name)))
        else:
            file.write_text(f"{name}\nsecond line\n")


def held(folder):
    found = read_folder(folder, KEY)
    names = {
        split: [str(file.relative_to(folder)) for file in files] for split, files in found.splits.items()
    }
    return names, {what: list(files) for what, files in found.remarks.items()}


def config_of(folder, **data):
    tree = {"model": {"name": "toy"}, "data": {"train_path": str(folder), **data}}
    return RunConfig.model_validate(tree)


@pytest.mark.parametrize(
    ("files", "splits", "remarks"),
    [
        (
            ["README.md", "dataset_infos.json", ".gitattributes", "data/train-00000-of-00001.parquet"],
            {"train": ["data/train-00000-of-00001.parquet"]},
            {ABOUT: ["README.md", "dataset_infos.json"]},
        ),
        (
            ["a.jsonl", "handbook.txt", "more/b.jsonl", "scan.pdf", "more/old.jsonl.gz"],
            {NO_SPLIT: ["a.jsonl", "more/b.jsonl"]},
            {BESIDE: ["handbook.txt"], OTHER: ["more/old.jsonl.gz", "scan.pdf"]},
        ),
        (
            ["train-1.jsonl", "Test-1.jsonl", "validation-1.jsonl", "extra.jsonl"],
            {"train": ["train-1.jsonl"], "test": ["Test-1.jsonl"], "validation": ["validation-1.jsonl"]},
            {UNNAMED: ["extra.jsonl"]},
        ),
        (
            [".train-old.jsonl", "._train.jsonl", "train.jsonl", "__MACOSX/train.jsonl", ".old/a.jsonl"],
            {"train": ["train.jsonl"]},
            {},
        ),
        (
            ["train/dev-chats.jsonl", "eval/a.jsonl", "my_dev/b.jsonl"],
            {"train": ["train/dev-chats.jsonl"], "test": ["eval/a.jsonl"], "validation": ["my_dev/b.jsonl"]},
            {},
        ),
        (
            ["data/train_sft-00000-of-00001-a3.parquet", "data/test_sft-00000-of-00001-b4.parquet"],
            {
                "train_sft": ["data/train_sft-00000-of-00001-a3.parquet"],
                "test_sft": ["data/test_sft-00000-of-00001-b4.parquet"],
            },
            {},
        ),
        (["trains.jsonl", "contest.jsonl"], {NO_SPLIT: ["contest.jsonl", "trains.jsonl"]}, {}),
        (
            ["b.md", "dev/setup.md", "deep/a.txt", ".git/c.txt", "e.pdf", "deep/README.md", "README.md"],
            {NO_SPLIT: ["b.md", "deep/README.md", "deep/a.txt", "dev/setup.md"]},
            {OTHER: ["e.pdf"], DOCUMENTS: ["dev/setup.md"], ABOUT: ["README.md"]},
        ),
        (["train.txt", "test.txt"], {"train": ["train.txt"], "test": ["test.txt"]}, {}),
    ],
)
def test_files_are_read_by_their_suffix_and_split_by_their_names(folder, files, splits, remarks):
    write(folder, *files)
    found, said = held(folder)
    assert {split: sorted(names) for split, names in found.items()} == {
        split: sorted(names) for split, names in splits.items()
    }
    assert said == remarks


def test_empty_documents_are_said(folder):
    write(folder, "a.txt")
    (folder / "blank.txt").write_text("")
    assert held(folder) == ({NO_SPLIT: ["a.txt"]}, {EMPTY: ["blank.txt"]})


@pytest.mark.parametrize(
    "files",
    [
        ["a.jsonl", "more/b.jsonl"],
        ["train.jsonl", "test.jsonl", "extra.jsonl"],
        ["train_0.jsonl", "my train.jsonl", "x-test.jsonl", "dev.1.jsonl", "devil.jsonl"],
        ["data/train/a.jsonl", "data/valid/b.jsonl", "test.jsonl"],
        ["train-part/a.jsonl", "old.eval/x/b.jsonl"],
        ["data/train_sft-00000-of-00001.jsonl", "data/odd-00000-of-00001.jsonl", "other.jsonl"],
        ["data/train-00000-of-00001.jsonl", "data/train-00001-of-00002.jsonl"],
    ],
)
def test_folders_are_divided_as_datasets_divides_them(folder, files):
    from datasets.data_files import NON_WORDS_CHARS, SPLIT_KEYWORDS, get_data_patterns, resolve_pattern

    write(folder, *files)
    found, _ = held(folder)
    expected = {
        split: sorted({name for pattern in patterns for name in _resolved(resolve_pattern, pattern, folder)})
        for split, patterns in get_data_patterns(str(folder)).items()
    }
    assert {split or "train": sorted(names) for split, names in found.items()} == expected
    assert set(WORD_ENDS) == set(NON_WORDS_CHARS)
    assert [set(words) for words in SPLIT_NAMES.values()] == [set(words) for words in SPLIT_KEYWORDS.values()]


def _resolved(resolve, pattern, folder):
    try:
        found = resolve(pattern, base_path=str(folder))
    except FileNotFoundError:
        return []
    return [path.removeprefix(f"{folder}/") for path in found]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["README.md", "scan.pdf"], ["has no data files; found", "README.md", "scan.pdf", "expected .jsonl"]),
        (["a.jsonl", "b.csv"], ["rows of several kinds: 1 JSON file (a.jsonl); 1 CSV file (b.csv)"]),
        (["train-test.jsonl"], ["train-test.jsonl is named for train and for test; rename it"]),
    ],
)
def test_what_can_be_meant_in_two_ways_is_an_error(folder, files, said):
    write(folder, *files)
    with pytest.raises(DataError) as caught:
        read_folder(folder, KEY)
    assert all(words in str(caught.value) for words in said)


def test_linked_folders_are_read_and_a_circle_is_refused(folder, tmp_path):
    write(tmp_path / "elsewhere", "b.jsonl")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    assert held(folder)[0] == {NO_SPLIT: ["linked/b.jsonl"]}
    (folder / "linked" / "again").symlink_to(folder)
    with pytest.raises(DataError, match=r"again is a link to a folder that it is in; remove the link"):
        read_folder(folder, KEY)


def test_a_split_is_named_as_that_of_a_hub_dataset(folder):
    write(folder, "data/train_sft-00000-of-00001.parquet", "data/test_sft-00000-of-00001.parquet", count=3)
    with pytest.raises(
        DataError, match=rf"no split train or training; it has .*Choose one: {folder}::<split>"
    ):
        open_source(str(folder), "train")
    found = open_source(f"{folder}::train_sft", "train")
    assert [file.name for file in found.files] == ["train_sft-00000-of-00001.parquet"]
    assert open_source(str(folder), "train", wanted="train_sft").files == found.files
    with pytest.raises(DataError, match=r"no split odd; it has"):
        open_source(f"{folder}::odd", "val")
    write(folder / "plain", "a.jsonl")
    with pytest.raises(DataError, match=r"has no splits, but split odd was asked for; remove the split"):
        open_source(f"{folder / 'plain'}::odd", "train")


def test_a_folder_with_test_rows_alone_is_no_training_data(folder):
    write(folder, "chats.jsonl", "chats-test.jsonl")
    with pytest.raises(DataError) as caught:
        open_source(str(folder), "train")
    assert "it has test, and chats.jsonl, which names none. Choose one" in str(caught.value)
    assert [file.name for file in open_source(str(folder), "test").files] == ["chats-test.jsonl"]


def test_test_rows_are_held_out_and_what_was_read_is_said(folder, make_tokenizer):
    write(folder, "train-1.jsonl", count=40)
    write(folder, "validation-1.jsonl", count=10)
    write(folder, "test-1.jsonl", "scan.pdf", "LICENSE", count=5)
    data = prepare(config_of(folder), make_tokenizer(), progress=False)
    assert (len(data.train), len(data.val), len(data.test)) == (40, 10, 5)
    assert {row.messages[0]["content"][:13] for row in data.conversations("test")} == {"test-1.jsonl "}
    assert json.loads(json.dumps(data.stats)) == data.stats
    screen = Console(file=io.StringIO(), width=1000)
    screen.print(show.table(data))
    for line in (
        f"  train: {folder}, split train: 1 file (train-1.jsonl)\n",
        f"  val: {folder}, split validation: 1 file (validation-1.jsonl)\n",
        f"  test: {folder}, split test: 1 file (test-1.jsonl)\n",
        f"  {folder}: left out (about the data, not part of it): LICENSE\n",
        f"  warning: {folder}: left out (neither rows nor text): scan.pdf\n",
    ):
        assert line in screen.file.getvalue()


def test_rows_that_the_config_names_take_the_place_of_a_split(folder, make_tokenizer, write_rows):
    write(folder, "train.jsonl", "test.jsonl", count=20)
    own = str(write_rows(rows(3, "Own"), "own.jsonl"))
    data = prepare(config_of(folder, test_path=own), make_tokenizer(), progress=False)
    assert (len(data.train), len(data.val), len(data.test)) == (19, 1, 3)
    alone = prepare(config_of(f"{folder}::train"), make_tokenizer(), progress=False)
    assert (len(alone.train), len(alone.val), alone.test) == (19, 1, None)


def test_splits_of_several_sources_are_joined(folder, make_tokenizer):
    for name in ("a", "b"):
        write(folder / name, "train.jsonl", "test.jsonl", count=10)
    sources = [{"path": str(folder / name), "weight": 2} for name in ("a", "b")]
    tree = {"model": {"name": "toy"}, "data": {"sources": sources, "val_fraction": 0}}
    data = prepare(RunConfig.model_validate(tree), make_tokenizer(), progress=False)
    assert (len(data.train), data.val, len(data.test)) == (20, None, 20)
    assert data.stats["train"]["sources"][1]["rows_per_epoch"] == 20


def test_rows_of_a_split_that_cannot_be_used_say_how_to_do_without(folder, make_tokenizer):
    write(folder, "train.jsonl", count=20)
    (folder / "test.jsonl").write_text('{"question": "q", "answer": ""}\n')
    with pytest.raises(
        DataError, match=rf"split test.*0 supervised.*\n.*use only the others: {folder}::train"
    ):
        prepare(config_of(folder), make_tokenizer(), progress=False)
    (folder / "test.jsonl").write_text('{"question": "q"}\n')
    with pytest.raises(DataError, match=rf"no format has.*(?s:.*)use only the others: {folder}::train"):
        prepare(config_of(folder), make_tokenizer(), progress=False)
    error = next(found for found in data_findings(config_of(folder)) if "test.jsonl" in found.what)
    assert error.fix.endswith(f"use only the training rows: {folder}::train")


def test_a_check_says_what_is_left_out(folder):
    write(folder, "a.jsonl", "handbook.txt")
    said = [finding.what for finding in data_findings(config_of(folder)) if finding.level == WARNING]
    assert said == [f"{folder}: left out (text next to rows): handbook.txt"]


def test_saved_datasets_are_read_with_their_splits_and_without_kept_results(folder):
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_list(rows(30))
    saved.save_to_disk(str(folder / "one"), num_shards=2)
    (folder / "one" / "cache-1234.arrow").write_bytes(b"kept by map")
    found = list(read_rows(open_source(str(folder / "one"), "val")))
    assert [row.data for row in found] == rows(30) and found[29].where.endswith("-00001-of-00002.arrow:15")
    mixed = [{"messages": [{"role": "user", "content": value}]} for value in ("text", {"a": 1}, None)]
    datasets.Dataset.from_list(mixed, on_mixed_types="use_json").save_to_disk(str(folder / "mixed"))
    found = [row.data["messages"][0] for row in read_rows(open_source(str(folder / "mixed"), "train"))]
    assert [message.get("content") for message in found] == ["text", {"a": 1}, None]
    parts = {"train_sft": saved, "train": saved.select(range(5)), "test": saved.select(range(2))}
    datasets.DatasetDict(parts).save_to_disk(str(folder / "dict"))
    opened = open_inputs(config_of(folder / "dict").data)
    assert [(given.split, source.split) for given, source in opened] == [("train", "train"), ("test", "test")]
    assert [len(list(read_rows(source))) for _, source in opened] == [5, 2]
    (folder / "dict" / "train" / "state.json").write_text("{}")
    with pytest.raises(DataError, match=r"state.json does not list what the saved dataset consists of"):
        open_source(str(folder / "dict"), "train")
