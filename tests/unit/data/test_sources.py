"""Several sources of training rows, each with its weight."""

import io
import json
from collections import Counter

import pytest
from rich.console import Console

from sft_play.config.inputs import data_inputs, training_paths
from sft_play.config.load import load_config
from sft_play.config.schema import RunConfig
from sft_play.data import prepare as module
from sft_play.data import show
from sft_play.data.batching import Share, draw_steps
from sft_play.data.prepare import prepare
from sft_play.errors import ConfigError, DataError

pytestmark = pytest.mark.usefixtures("own_cache")


OTHER = [{"input_text": f"What is {i}?", "target_text": f"It is {i}."} for i in range(40)]
COLUMNS = {"prompt": "input_text", "completion": "target_text", "system": "role"}


def questions(count, word="What"):
    return [{"question": f"{word} is {i}?", "answer": f"It is {i}."} for i in range(count)]


@pytest.fixture
def run(write_rows, make_tokenizer):
    """`run([(rows, {weight: ...}), ...], **data settings)` prepares sources with a fresh tokenizer."""

    def run(sources, seed=0, **data):
        paths = [
            {"path": str(write_rows(rows, f"{number}.jsonl")), **more}
            for number, (rows, more) in enumerate(sources)
        ]
        tree = {"model": {"name": "toy"}, "data": {"sources": paths, **data}, "train": {"seed": seed}}
        return prepare(RunConfig.model_validate(tree), make_tokenizer(), progress=False)

    return run


def test_rows_of_all_sources_follow_each_other_and_know_their_weight(run, make_tokenizer):
    data = run([(questions(30), {}), (questions(20, "Who"), {"weight": 2.5})], val_fraction=0.0)
    assert data.shares == (Share(30, 1.0), Share(20, 2.5))
    texts = [make_tokenizer().decode(ids) for ids in data.train["input_ids"]]
    assert all("What" in text for text in texts[:30]) and all("Who" in text for text in texts[30:])
    first, second = data.stats["train"]["sources"]
    assert (second["rows"], second["rows_per_epoch"], second["weight"]) == (20, 50, 2.5)
    assert second["tokens"] == sum(data.train["length"][30:])
    assert second["tokens_per_epoch"] == round(2.5 * second["tokens"])
    assert first["tokens"] + second["tokens"] == data.stats["train"]["tokens"]
    assert json.loads(json.dumps(data.stats)) == data.stats


def test_an_epoch_learns_each_source_exactly_as_often_as_its_weight_says(run):
    data = run([(questions(10), {"weight": 0.5}), (questions(8, "Who"), {"weight": 3})], val_fraction=0.0)
    epochs = draw_steps(data.shares, 29, 2, seed=0)
    for epoch in epochs:
        seen = Counter(epoch.tolist())
        assert sum(seen[row] for row in range(10)) == 5 and all(seen[row] == 3 for row in range(10, 18))
    assert all(count == 1 for row, count in Counter(epochs.ravel().tolist()).items() if row < 10)


def test_each_source_gives_its_share_of_the_held_out_rows_and_duplicates_stay_together(run, make_tokenizer):
    both = [(questions(100), {}), (questions(20, "Who") + questions(100), {"weight": 9})]
    data = run(both, val_fraction=0.1)
    assert [source["conversations"] for source in data.stats["val"]["sources"]] == [10, 2 + 10]
    held, kept = (
        {make_tokenizer().decode(ids) for ids in rows["input_ids"]} for rows in (data.val, data.train)
    )
    assert not held & kept
    without = run(both, val_fraction=0.1, dedup=True)
    assert without.stats["train"]["dropped"] == {"duplicate": 100}
    assert [source["rows"] for source in without.stats["train"]["sources"]] == [90, 18]


def test_another_weight_tokenizes_nothing_anew_but_is_another_fingerprint(run, monkeypatch):
    first = run([(questions(20), {}), (questions(20, "Who"), {})])
    monkeypatch.setattr(module, "encode_all", lambda *args: pytest.fail("tokenized again"))
    second = run([(questions(20), {}), (questions(20, "Who"), {"weight": 2})])
    assert second.cache_path == first.cache_path and second.fingerprint != first.fingerprint
    assert second.shares[1].weight == 2


def test_the_order_and_the_format_of_sources_belong_to_the_fingerprint(run):
    rows = [{"text": "once", "question": "What?", "answer": "Four."}] * 20
    pair = [(rows, {}), (questions(20), {})]
    paths = {run(pair).cache_path, run(pair[::-1]).cache_path}
    paths.add(run([(rows, {"format": "text"}), (questions(20), {})]).cache_path)
    assert len(paths) == 3


def test_a_source_of_weight_zero_is_not_read(run):
    data = run([(questions(20), {}), ("no rows", {"weight": 0})])
    assert len(data.shares) == 1 and len(data.stats["train"]["sources"]) == 1


def test_the_table_shows_rows_tokens_and_shares_of_an_epoch(run):
    data = run([(questions(30), {}), (questions(20, "Who"), {"weight": 3})], val_fraction=0.0)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(show.table(data))
    lines = {line.split()[0]: line.split() for line in console.export_text().splitlines() if line.strip()}
    assert lines["0.jsonl"][1:5] == ["1", "30", "30", "33.3%"]
    assert lines["1.jsonl"][1:5] == ["3", "20", "60", "66.7%"]


def test_process_writes_the_rows_of_all_sources_and_style_reads_them_whatever_their_format(
    write_rows, tmp_path
):
    sources = [
        {"path": str(write_rows(questions(3), "a.jsonl"))},
        {"path": str(write_rows([{"text": "once"}], "b.jsonl")), "weight": 2},
    ]
    config = RunConfig.model_validate(
        {"model": {"name": "toy"}, "data": {"sources": sources, "task": "mixed"}}
    )
    out, styled = tmp_path / "out.jsonl", tmp_path / "styled.jsonl"
    assert show.process(config, out) == {"written": 4}
    assert show.style(out, styled, "Be brief.")["written"] == 4
    rows = [json.loads(line) for line in styled.read_text().splitlines()]
    assert rows[0]["messages"][0]["content"] == "Be brief." and rows[3]["text"] == "once"


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ([(questions(20), {}), ("\n\n", {})], r"data.sources\[1\]: .*1.jsonl has no rows"),
        (
            [(questions(20), {}), ([{"question": "q", "answer": ""}], {})],
            r"data.sources\[1\] \(.*1.jsonl\): 0 supervised tokens: none of the 1 rows",
        ),
        (
            [(questions(20), {"split": "train"})],
            r"data.sources\[0\]: .*0.jsonl has no splits, but split train was asked for",
        ),
        ([(questions(20), {}), ([{"a": 1}], {})], r"1.jsonl:1: no format has the keys a"),
    ],
)
def test_a_source_that_gives_nothing_is_named(run, sources, said):
    with pytest.raises(DataError, match=said):
        run(sources)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("{}", "data: train_path is required (or sources, for several)"),
        ("{train_path: a, sources: [{path: b}]}", "data: train_path and sources are both given"),
        ("{sources: [{path: a, weight: 0}, {path: b, weight: 0}]}", "data: sources: the weights add up to 0"),
        (
            "{sources: [{path: a, weight: -1}]}",
            "data.sources[0].weight: input should be greater than or equal",
        ),
        (
            "{sources: [{path: a}, {path: b, weight: .nan}]}",
            "data.sources[1].weight: input should be a finite",
        ),
        ("{sources: [{path: a}, {path: a, weight: 2}]}", "data: sources: 'a' is listed twice"),
        (
            "{sources: [{path: a, wieght: 2}]}",
            "data.sources[0].wieght: unknown key; did you mean data.sources[0].weight?",
        ),
        ("{sources: [{weight: 2}]}", "data.sources[0].path: is required"),
        ("{sources: [{path: a, format: chatml}]}", "data.sources[0].format: expected auto, "),
        ("{sources: a.jsonl}", "data.sources: input should be a list"),
        ("{train_path: a, task: cpt, system_prompt: hi}", "data: system_prompt has no effect with task=cpt"),
    ],
)
def test_sources_that_contradict_themselves_are_one_clear_sentence(tmp_path, data, said):
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {{name: m}}\ndata: {data}\n")
    with pytest.raises(ConfigError) as error:
        load_config(file)
    assert f"  {said}" in str(error.value) and "1 problem in the config" in str(error.value)


def test_inputs_have_the_names_that_messages_use(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {name: m}\ndata: {sources: [{path: a, weight: 0}, {path: b}], format: text, val_path: c}\n"
    )
    config = load_config(file, ["data.val_fraction=0.1"]).config
    assert [(given.key, given.path, given.format) for given in data_inputs(config.data)] == [
        ("data.sources[1]", "b", "text"),
        ("data.val_path", "c", "text"),
    ]
    assert training_paths(config.data) == ["b"]
    again = load_config(file, ["data.sources=[{path: x, weight: 2}]"]).config
    assert again.data.sources[0].weight == 2


def test_columns_say_what_keys_are_called_in_the_data(run):
    """`system` may be missing from rows, `prompt` may not; other sources have columns of their own."""
    prepared = run([(OTHER, {}), (questions(40), {"columns": {}})], columns=COLUMNS)
    as_named = run(
        [
            ([{"prompt": o["input_text"], "completion": o["target_text"]} for o in OTHER], {}),
            (questions(40), {}),
        ]
    )
    assert prepared.train["input_ids"] == as_named.train["input_ids"]
    assert not any("not used" in warning for warning in prepared.stats["warnings"])
    with_roles = run([([{**row, "role": "Be brief."} for row in OTHER], {})], columns=COLUMNS)
    assert with_roles.stats["train"]["tokens"] > run([(OTHER, {})], columns=COLUMNS).stats["train"]["tokens"]
    with pytest.raises(
        DataError, match="data.columns.prompt is 'question', which is not a key of the row: input_t"
    ):
        run([(OTHER, {})], columns={**COLUMNS, "prompt": "question"})
    with pytest.raises(DataError, match="keys are called here: data.columns.prompt=<key>"):
        run([(OTHER, {})])
