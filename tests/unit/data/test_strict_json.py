"""JSON of users is read strictly, wherever it stands."""

import json

import pytest

from sft_play.config.schema import RunConfig
from sft_play.data.prepare import prepare
from sft_play.data.reading import read_rows
from sft_play.data.sources import open_source
from sft_play.errors import DataError
from sft_play.rows.formats import convert, detect_format
from sft_play.rows.json_files import Row
from sft_play.rows.strict_json import parse


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1, "a": 2}', "duplicate key 'a'"),
        ('{"b": [{"a": 1, "a": 1}]}', "duplicate key 'a'"),
        ("NaN", "NaN is not allowed in JSON"),
        ('{"a": -Infinity}', "-Infinity is not allowed in JSON"),
        ("1e400", "1e400 is beyond the numbers of 64 bits"),
        ("[" * 101 + "]" * 101, "nested more than 100 levels"),
        ("[" * 100_000, "nested more than 100 levels"),
        ("9" * 5000, "digits"),
        ("{'a': 1}", "Expecting property name"),
    ],
)
def test_what_two_readers_could_take_differently_is_an_error(text, said):
    with pytest.raises(ValueError, match=said):
        parse(text)


def test_what_is_json_is_what_json_says():
    text = '{"a": [1, -2.5, 1e300, 12345678901234567890, null, true], "b": {"c": "\\u00e4"}}'
    assert parse(text) == json.loads(text)


def conversation(call=None, tools=None, content=""):
    answer = {"role": "assistant", "content": content, **({"tool_calls": [call]} if call else {})}
    return {"messages": [{"role": "user", "content": "q"}, answer], **({"tools": tools} if tools else {})}


def call(arguments):
    return {"function": {"name": "set", "arguments": arguments}}


@pytest.mark.parametrize("arguments", ['{"a": 1, "a": 2}', '{"a": NaN}', '{"a": 1e400}'])
@pytest.mark.parametrize(
    "data",
    [
        lambda text: conversation(call(text)),
        lambda text: conversation(content=[{"type": "tool_call", "value": f'{{"name": "set", "arguments": {text}}}'}]),
        lambda text: conversation(content="a", tools=f'[{{"name": "set", "parameters": {text}}}]'),
        lambda text: {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": f'{{"name": "set", "arguments": {text}}}'},
            ]
        },
    ],
)  # fmt: skip
def test_json_in_strings_of_a_row_is_as_strict_as_the_row(arguments, data):
    row = Row(data(arguments), "f.jsonl", 1)
    with pytest.raises(
        DataError, match=r"f.jsonl:1: .* is a string but not valid JSON: .*(duplicate|NaN|1e400)"
    ):
        convert(row, detect_format(row))


def arguments_of(path):
    (row,) = list(read_rows(open_source(str(path), "train")))[:1]
    return convert(row, "messages").messages[1]["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"minutes": 5, "label": None, "more": {"deep": None}}, {"minutes": 5, "more": {}}),
        ('{"minutes": 5, "label": null}', {"minutes": 5, "label": None}),
    ],
)
def test_a_tool_call_is_the_same_from_every_kind_of_file(write_rows, tmp_path, arguments, expected):
    import pyarrow as pa
    import pyarrow.parquet as pq

    other = arguments if isinstance(arguments, str) else {"minutes": 1, "label": "a", "more": {"deep": 1}}
    rows = [conversation(call(arguments)), conversation(call(other))]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    columns = "messages\n" + "".join(
        '"{}"\n'.format(json.dumps(row["messages"]).replace('"', '""')) for row in rows
    )
    files = [tmp_path / "rows.parquet", write_rows(rows), write_rows(columns, "rows.csv")]
    assert [arguments_of(file) for file in files] == [expected] * 3


def test_nulls_that_are_left_out_are_said(write_rows, make_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    tools = [{"name": "set", "parameters": {"default": None}}]
    rows = [
        conversation(call({"a": None})),
        conversation(call({"a": 1}), tools),
        conversation(call('{"a": null}')),
    ]
    data = {"train_path": str(write_rows(rows)), "val_fraction": 0}
    config = RunConfig.model_validate({"model": {"name": "toy"}, "data": data})
    warnings = prepare(config, make_tokenizer(), progress=False).stats["warnings"]
    said = "data.train_path: 2 rows with null in a tool or in the arguments of a call, which is left out: "
    assert any(warning.startswith(said) for warning in warnings)
