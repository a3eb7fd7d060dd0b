import json
import subprocess
from collections import Counter

import pytest

from sft_play.config.inputs import DataInput, data_inputs
from sft_play.config.load import load_config
from sft_play.data.reading import read_rows
from sft_play.data.sources import fingerprint, open_source, require_here
from sft_play.errors import DataError
from sft_play.rows.tables import NUMBERED

ROW = {"question": "q", "answer": "a"}
LINE = json.dumps(ROW)


def read(path, **kwargs):
    rows = list(read_rows(open_source(str(path), "train"), **kwargs))
    for row in rows:
        row.require_read()
    return rows


def error_of(path):
    with pytest.raises(DataError) as caught:
        read(path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "lines"),
    [
        ("a.jsonl", f"{LINE}\n{LINE}\n", [1, 2]),
        ("a.jsonl", f"\n\n{LINE}\n   \n{LINE}", [3, 5]),
        ("a.jsonl", f"\ufeff{LINE}\r\n{LINE}", [1, 2]),
        ("a.jsonl", LINE, [1]),
        ("a.jsonl", f"[{LINE},\n{LINE}]", [1, 2]),
        ("a.json", f"[\n{LINE}\n,\n\n{LINE}]\n", [2, 5]),
        ("a.json", f'{{"data": [{LINE},\n{LINE}], "version": 1}}', [1, 2]),
        ("a.json", f'{{"version": 1,\n "data": [{LINE}, {LINE}]}}', [1, 2]),
        ("a.json", f"{LINE}\n{LINE}\n", [1, 2]),
        ("a.json", json.dumps(ROW, indent=2), [1]),
        ("a.csv", 'question,answer\n"q",a\nq,"a"\n', [2, 3]),
        ("a.csv", "\ufeffquestion,answer\r\nq,a\r\n", [2]),
        ("a.csv", "\ufeffquestion;answer\r\nq;a\r\n", [2]),
        ("a.csv", "\nquestion|answer\n\nq|a\n", [4]),
        ("a.tsv", "question\tanswer\nq\ta\n", [2]),
    ],
)
def test_rows_are_read_with_the_line_they_stand_in(write_rows, name, content, lines):
    rows = read(write_rows(content, name))
    assert [row.data for row in rows] == [ROW] * len(lines)
    assert [row.line for row in rows] == lines


def test_a_csv_row_over_several_lines_has_the_number_of_its_first(write_rows):
    rows = read(write_rows('question,answer\n"a\nb",c\nd,e\n', "a.csv"))
    assert [(row.data["question"], row.line) for row in rows] == [("a\nb", 2), ("d", 4)]


def test_a_csv_cell_can_hold_a_conversation_as_json(write_rows):
    assert read(write_rows('messages\n"[{""role"": ""user""}]"\n', "a.csv"))[0].data == {
        "messages": [{"role": "user"}]
    }


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_fields_may_have_other_marks_in_them_and_decimal_commas_stay_text(write_rows, mark):
    cells = ["2,5", "a; b", "tab\there"]
    line = mark.join(f'"{cell}"' if mark in cell else cell for cell in cells)
    (row,) = read(write_rows(f"{mark.join(('one', 'two', 'three'))}\n{line}\n", "a.csv"))
    assert list(row.data.values()) == cells


def test_the_index_that_pandas_writes_is_left_out_and_counted(write_rows):
    notes = Counter()
    source = open_source(str(write_rows(",question,answer\n0,q,a\n7,q,a\n", "a.csv")), "train")
    assert [row.data for row in read_rows(source, notes=notes)] == [ROW, ROW]
    assert notes == {NUMBERED: 2}


def test_parquet_is_read_without_the_nulls_that_fill_its_structs(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    calls = [
        {"role": "user", "content": "q", "name": None},
        {"role": "assistant", "content": "a", "name": "bot"},
    ]
    pq.write_table(pa.Table.from_pylist([{"messages": calls, "tools": None}]), tmp_path / "a.parquet")
    (row,) = read(tmp_path / "a.parquet")
    assert row.data == {
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "name": "bot"}]
    }


def test_columns_have_the_values_that_rows_of_json_have(tmp_path):
    import datetime

    import pyarrow as pa
    import pyarrow.parquet as pq

    values = {"a": float("nan"), "b": [1.5, float("-inf")], "c": datetime.date(2026, 1, 2), "d": {"e": None}}
    pq.write_table(pa.Table.from_pylist([values]), tmp_path / "a.parquet")
    notes = Counter()
    (row,) = read_rows(open_source(str(tmp_path / "a.parquet"), "train"), notes=notes)
    assert row.data == {"b": [1.5, None], "c": "2026-01-02", "d": {}}
    assert notes == {"NaN values, read as null": 1, "-Infinity values, read as null": 1}


def test_columns_of_the_same_name_are_refused(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_arrays(
        [pa.array(["q"]), pa.array(["a"]), pa.array(["b"])], ["question", "answer", "answer"]
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows.parquet: duplicate column name in question, answer, answer"):
        list(read_rows(open_source(str(tmp_path / "rows.parquet"), "train")))


def test_blank_lines_and_nan_are_read_past_and_counted(write_rows):
    notes = Counter()
    source = open_source(str(write_rows('\n{"text": "a", "score": NaN}\n')), "train")
    assert [row.data for row in read_rows(source, notes=notes)] == [{"text": "a", "score": None}]
    assert notes == {"blank lines": 1, "NaN values, read as null": 1}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b"", "empty (0 bytes)"),
        ("a.jsonl", f'{LINE}\n{{"question": "q", "ans', "is the file truncated?"),
        ("a.jsonl", f"{LINE}\ngarbage\n{LINE}\n", ":2: not valid JSON: Expecting value at character 1"),
        ("a.jsonl", f'{LINE}\n{{"question": "q\n{LINE}\n', ":2: not valid JSON: Unterminated string starting at character 14"),
        ("a.csv", "question,answer\na\n", ":2: expected 2 fields (question, answer), found 1"),
        ("a.csv", "question,answer\na,b,c\n", ":2: expected 2 fields (question, answer), found 3"),
        ("a.csv", ",question,answer\n0,q,a,b\n", ":2: expected 3 fields (, question, answer), found 4"),
        ("a.csv", ",question,answer\none,q,a\n", ":2: the first column has no name, so it should count the rows, but here it is 'one'"),
        ("a.csv", "question,answer,\nq,a,\n", ":1: column 3 has no name"),
        ("a.jsonl", LINE.encode() + b"\n\x00\x00\n", ":2: not valid JSON"),
        ("a.jsonl", LINE.encode() + b'\n{"a": "\xff"}\n', f":2: byte 0xff at offset {len(LINE) + 8} is not UTF-8"),
        ("a.jsonl", LINE.encode("utf-16"), "UTF-16"),
        ("a.jsonl", f'{LINE}\n{{"a": 1, "b": {{"c": 1, "c": 2}}}}\n', ":2: duplicate key 'c'"),
        ("a.jsonl", '{"question": 1e400}\n', ":1: 1e400 is beyond the numbers of 64 bits"),
        ("a.json", f'[{LINE},\n{{"a": -1e999}}]', ":2: -1e999 is beyond"),
        ("a.csv", 'messages\n"{""a"": 1, ""a"": 2}"\n', ":2: column 'messages' is not valid JSON: duplicate key 'a'"),
        ("a.csv", "tools\n[NaN]\n", ":2: column 'tools' is not valid JSON: NaN is not allowed in JSON"),
        ("a.jsonl", f"{LINE}\n[1, 2]\n", ":2: expected a JSON object, found a list"),
        ("a.jsonl", "[" * 100_000, "recursion"),
        ("a.jsonl", f'{LINE}\n{{"a": {"[" * 100}{"]" * 100}}}\n', ":2: nested more than 100 levels deep"),
        ("a.json", f'[{LINE},\n{{"a": {"[" * 100}{"]" * 100}}}]', ":2: nested more than 100 levels deep"),
        ("a.csv", f'messages\n{"[" * 101}{"]" * 101}\n', ":2: column 'messages' is not valid JSON: nested more"),
        ("a.json", f"[{LINE},\n{LINE}", ":2: not valid JSON: expected ',' or ']' after a row, found the end: is the file truncated?"),
        ("a.json", f"[{LINE},\n{LINE}\n{LINE}]", ":3: not valid JSON: expected ','"),
        ("a.json", f"[{LINE},\n5]", ":2: expected a JSON object"),
        ("a.json", f"[{LINE}]\ngarbage", "after the array"),
        ("a.json", f"[{LINE}]\n,{LINE}", "after the array"),
        ("a.json", f'{{"data": [{LINE}]}}\n{{"data": [{LINE}]}}', "after the array"),
        ("a.json", f'{{"data": [{LINE}], "data": [{LINE}]}}', "duplicate key 'data'"),
        ("a.json", f'{{"data": [{LINE}]', "after the array"),
        ("a.json", f'[{LINE},\n{{"a": 1,\n"a": 2}}]', ":2: duplicate key 'a'"),
        ("a.json", b'[{"a": 1},\n{"b": "\xff"}]', ":2: byte 0xff at offset 18"),
        ("a.json", "not json", ":1: not valid JSON"),
        ("a.csv", 'question,answer\nq\n', ":2: expected 2 fields"),
        ("a.csv", 'question,answer\nq,a\nq,a,b\n', ":3: expected 2 fields"),
        ("a.csv", 'question,answer\nq,"a\n', ":2: not valid CSV"),
        ("a.csv", "text,text\na,b\n", ":1: duplicate column name"),
        ("a.csv", b"text\na\n\xff\n", ":3: byte 0xff at offset 7"),
        ("a.csv", "messages\n[oops\n", ":2: column 'messages' is not valid JSON"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n", "a pointer to it, of Git LFS"),
        ("a.parquet", b"PAR1 no parquet", "not a readable Parquet file"),
        ("a.log", "hello", "has the extension .log; allowed: .jsonl"),
        ("a.txt", b"one\n\xff", ":2: byte 0xff at offset 4"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named_with_its_line(write_rows, name, content, said):
    path = write_rows(content, name)
    message = error_of(path)
    assert str(path) in message
    assert said in message


def test_utf16_is_converted_by_the_command_that_is_shown(write_rows):
    path = write_rows(f"{LINE}\n{LINE}\n".encode("utf-16"), "my rows.jsonl")
    head, command = error_of(path).splitlines()
    assert head.startswith("data.train_path: ") and "is UTF-16; expected UTF-8" in head
    subprocess.run(["sh", "-c", command], check=True, cwd="/")
    assert path.with_name("my rows.utf8.jsonl").read_text() == f"{LINE}\n{LINE}\n"


def test_a_row_that_is_null_is_said_to_be_null(write_rows):
    for name, content in (("a.jsonl", f"{LINE}\nnull\n"), ("a.json", f"[{LINE},\nnull]")):
        assert ":2: expected a JSON object, found null" in error_of(write_rows(content, name))


def test_long_rows_with_many_brackets_are_read(write_rows):
    deep = f'{{"a": {"[" * 99}{"]" * 99}}}\n'
    wide = json.dumps({"a": [[] for _ in range(1000)]})
    source = open_source(str(write_rows(deep + wide)), "train")
    assert len(list(read_rows(source))) == 2


@pytest.mark.parametrize(
    "path", ["missing.jsonl", "./org/name", "org/name/more/parts", "name", "$(id)", "x" * 5000, "a\0b"]
)
def test_a_path_that_is_no_file_and_no_hub_name_is_an_error_that_says_what_is_allowed(
    path, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"data.val_path"):
        open_source(path, "val")


@pytest.mark.parametrize("name", ["rows.jsonl", "notes.txt", "below/notes.md"])
@pytest.mark.parametrize("others", [True, False])
def test_a_link_to_nothing_in_a_folder_is_named_since_its_rows_would_be_missing(tmp_path, name, others):
    link = tmp_path / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to("gone")
    if others:
        link.with_name(f"a{link.suffix}").write_text(LINE)
    with pytest.raises(DataError, match=rf"{name} is a link to gone, which does not exist"):
        open_source(str(tmp_path), "train")


def test_a_folder_without_data_files_and_a_fifo_are_refused(tmp_path):
    with pytest.raises(DataError, match="has no data files"):
        open_source(str(tmp_path), "train")
    import os

    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match="neither a file nor a folder"):
        open_source(str(tmp_path / "pipe.jsonl"), "train")


def test_a_hub_name_that_cannot_be_reached_is_a_data_error_of_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        DataError,
        match=r"data.train_path: 'no-such-org/no-such-data' is not a local file, and loading it as a Hub dataset",
    ):
        open_source("no-such-org/no-such-data", "train")


def test_the_fingerprint_follows_the_bytes_and_not_the_folder(write_rows, tmp_path):
    first = fingerprint(open_source(str(write_rows([ROW, ROW])), "train"))
    (tmp_path / "other").mkdir()
    assert fingerprint(open_source(str(write_rows([ROW, ROW], "other/rows.jsonl")), "train")) == first
    assert first[1] == 2
    assert fingerprint(open_source(str(write_rows([ROW])), "train"))[0] != first[0]


@pytest.mark.parametrize("path", ["none.jsonl", "./none", "/none/here", "org/none.csv"])
def test_paths_that_are_not_here_are_found_without_reading(path):
    with pytest.raises(DataError, match="does not exist"):
        require_here([DataInput("data.train_path", "train", path, "auto")])


@pytest.mark.parametrize("split", ["val", "test"])
def test_a_path_of_held_out_rows_that_is_not_here_may_be_left_empty(split):
    empty = f"data.{split}_path="
    with pytest.raises(DataError, match=rf"or leave it empty \({empty}\), to hold out data.{split}_fraction"):
        require_here([DataInput(f"data.{split}_path", split, "none.jsonl", "auto")])
    given = load_config("configs/demo.yaml", [f"{empty}none.jsonl", empty]).config.data
    assert split not in {each.split for each in data_inputs(given)}


@pytest.mark.parametrize("path", ["org/name", "org/name:main:train", "builtin:demo", "builtin:none"])
def test_hub_datasets_and_built_in_rows_are_not_asked_for_yet(path):
    inputs = [("data.train_path", "train", path), ("data.val_path", "val", "none.jsonl")]
    with pytest.raises(DataError, match="'none.jsonl' does not exist"):  # the first one that is refused
        require_here(DataInput(*each, "auto") for each in inputs)
