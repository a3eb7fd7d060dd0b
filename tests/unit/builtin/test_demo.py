import dataclasses
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sft_play.builtin import demo
from sft_play.config.load import ResolvedConfig, dump_resolved
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, DataError


def resolved(model: str = "some/model", **data: str) -> ResolvedConfig:
    config = RunConfig.model_validate(
        {"model": {"name": model}, "data": {"train_path": "train.jsonl", **data}}
    )
    return ResolvedConfig(config, {"model.name": "a.yaml", "data.train_path": "a.yaml"}, "a.yaml")


@pytest.fixture
def own_rows(tmp_path):
    file = tmp_path / "own.jsonl"
    rows = [
        {"question": f"How many is {i}?", "answer": f"It is {i * 37 % 101}.\n#### {i}"} for i in range(50)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_config_without_builtins_is_left_as_it_is():
    before = resolved(test_path="test.jsonl")
    assert demo.materialise(before) == before


def test_the_demo_rows_become_files_and_the_rest_of_the_config_stays():
    before = resolved(train_path="builtin:demo", val_path="builtin:demo", test_path="own-test.jsonl")
    after = demo.materialise(before)
    train, val = (
        [json.loads(line) for line in Path(path).open()]
        for path in (after.config.data.train_path, after.config.data.val_path)
    )
    assert (len(train), len(val)) == (2000, 100)
    assert [message["role"] for message in train[0]["messages"]] == ["user", "assistant"]
    assert after.config.data.test_path == "own-test.jsonl"
    changed = after.config.data.model_copy(update={"train_path": "builtin:demo", "val_path": "builtin:demo"})
    assert (
        dataclasses.replace(after, config=after.config.model_copy(update={"data": changed})).config
        == before.config
    )
    assert after.origins["data.train_path"] == "a.yaml, builtin:demo"
    assert "# a.yaml, builtin:demo" in dump_resolved(after)


def test_what_a_run_was_made_of_is_made_again_when_the_cache_was_cleared():
    begun = demo.materialise(resolved(train_path="builtin:demo"))
    path = Path(begun.config.data.train_path)
    rows = path.read_text()
    shutil.rmtree(path.parent)
    assert demo.materialise(begun).config == begun.config
    assert path.read_text() == rows


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            resolved("builtin:demon"),
            "model.name: unknown built-in builtin:demon; allowed: builtin:demo, builtin:shapes, builtin:tiny, ",
        ),
        (
            resolved(val_path="builtin:tiny"),
            "data.val_path: unknown built-in builtin:tiny; allowed: builtin:demo, builtin:replies, builtin:shapes",
        ),
    ],
)
def test_an_unknown_builtin_is_refused_with_those_that_exist(config, message):
    with pytest.raises(ConfigError, match=message):
        demo.materialise(config)


def test_the_tiny_model_is_build_once_for_its_rows_and_found_again_without_torch(own_rows, tmp_path):
    first = demo.materialise(resolved("builtin:tiny", train_path=str(own_rows))).config.model.name
    written = Path(first, "model.safetensors").stat().st_mtime_ns
    script = (
        "import sys\nfrom sft_play.builtin import demo\nfrom sft_play.config.load import ResolvedConfig\n"
        "from sft_play.config.schema import RunConfig\n"
        f"tree = {{'model': {{'name': 'builtin:tiny'}}, 'data': {{'train_path': {str(own_rows)!r}}}}}\n"
        "found = demo.materialise(ResolvedConfig(RunConfig.model_validate(tree), {}, 'a.yaml'))\n"
        "assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules)\n"
        "print(found.config.model.name)\n"
    )
    again = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert again.stdout.strip() == first, again.stderr
    assert Path(first, "model.safetensors").stat().st_mtime_ns == written

    own_rows.write_text(own_rows.read_text() + '{"question": "One more?", "answer": "Yes."}\n')
    assert demo.materialise(resolved("builtin:tiny", train_path=str(own_rows))).config.model.name != first


def test_rows_with_half_a_character_have_a_tiny_model_too(tmp_path):
    """Who reads the rows for the run refuses them in a sentence."""
    (tmp_path / "half.jsonl").write_text('{"question": "\\ud83d", "answer": "w1"}')
    made = demo.materialise(resolved("builtin:tiny", train_path=str(tmp_path / "half.jsonl")))
    assert (Path(made.config.model.name) / "tokenizer.json").is_file()


def test_the_tiny_model_without_readable_rows_says_what_is_wrong(tmp_path):
    missing = str(tmp_path / "nothing.jsonl")
    with pytest.raises(DataError, match=r"^data\.train_path: .* does not exist"):
        demo.materialise(resolved("builtin:tiny", train_path=missing))
    with pytest.raises(DataError, match=r"^data\.sources\[0\]: .* does not exist"):
        demo.materialise(resolved("builtin:tiny", train_path=None, sources=[{"path": missing}]))


def test_what_fails_while_it_is_made_leaves_nothing_that_looks_finished(tmp_path):
    def fail(folder):
        (folder / "config.json").write_text("{}")
        raise ValueError("half way")

    with pytest.raises(ValueError, match="half way"):
        demo._build_once(tmp_path / "thing", fail)
    assert not (tmp_path / "thing").exists() and not list(tmp_path.glob("thing.tmp*"))
    assert demo._build_once(tmp_path / "thing", lambda folder: {"fact": 1}) == tmp_path / "thing"


def test_several_that_ask_at_once_share_one_making(tmp_path):
    made = []

    def make(folder):
        made.append(folder)
        (folder / "file").write_text("x")
        return {}

    threads = [threading.Thread(target=demo._build_once, args=(tmp_path / "thing", make)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and (tmp_path / "thing" / "file").read_text() == "x"


def test_only_the_first_characters_of_the_rows_are_taken():
    assert list(demo._within(5, iter(["abc", "def", "ghi"]))) == ["abc", "de"]
    assert list(demo._texts({"a": "one", "b": [{"c": "two"}, 3, None]})) == ["one", "two"]
