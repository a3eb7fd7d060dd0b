"""The Python API takes what people have at hand, or says what it takes."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import sft_play.api as sft
from scripts.docs.python_reference import python_reference
from sft_play.commands.judges import require_given
from sft_play.config.inputs import asked_name
from sft_play.config.load import load_config
from sft_play.errors import ConfigError, DataError
from sft_play.given import by_name, write_given


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
    assert sft._overrides({}) == []


ROWS = [{"question": f"{i}?", "answer": f"{i}."} for i in range(3)]


def test_keywords_are_the_last_names_of_settings():
    assert by_name({"max_steps": 5, "mode": "lora", "r": 8, "lora_alpha": 16, "eval_limit": 3, "output_dir": "out"}) == {
        "train.max_steps": 5, "tuning.mode": "lora", "tuning.lora.r": 8, "tuning.lora.alpha": 16, "eval.limit": 3,
        "output.dir": "out",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("keyword", "said"),
    [
        ("limit", "limit is a setting of 2 sections; write data_limit or eval_limit"),
        ("max_step", r"max_step is not a setting; did you mean max_steps\?"),
        ("zzz", "zzz is not a setting; docs/reference/config.md"),
        ("lr", r"lr is not a setting; did you mean learning_rate\?"),
        ("base_model", r"base_model is not a setting; did you mean model_name\?"),
        ("bf16", r"bf16 is not a setting; did you mean mixed_precision='bf16'\?"),
    ],
)
def test_keywords_of_no_setting_or_of_several_are_refused(keyword, said):
    for command in (sft.plan, sft.train):
        with pytest.raises(ConfigError, match=said):
            command("configs/demo.yaml", **{keyword: 1})


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: sft.plan("qwen3-8bb", gpu="RTX 4090"), "model=qwen3-8bb is unknown; closest: Qwen/Qwen3-8B"),
        (lambda: sft.plan("qwen3-8b", gpu="RTX 4091"), 'gpu="RTX 4091"'),
        (lambda: sft.plan("qwen3-8b", gpus=0), "gpus=0: expected a whole number from 1"),
        (lambda: sft.train("configs/demo.yaml", processes=-1), "processes=-1: expected a whole number"),
    ],
)
def test_a_wrong_argument_is_named_as_in_the_call(call, said):
    with pytest.raises(ConfigError, match=f"^{said}"):
        call()


def test_a_split_that_is_none_is_named_as_in_the_call(tmp_path):
    (tmp_path / "config.resolved.yaml").write_text("")
    with pytest.raises(ConfigError, match="^split=train: expected val or test$"):
        sft.evaluate(sft.Run(tmp_path), split="train")


def test_rows_and_settings_become_files_of_the_run(tmp_path):
    folder = tmp_path / "runs" / "mine"
    settings = {"model.name": "m", "train.max_steps": 5, "tuning.lora.r": 8, "data.val_path": Path("v.jsonl")}
    loaded = load_config(write_given(settings, ROWS, folder))
    config = loaded.config
    assert (config.output.name, config.output.dir) == ("mine", str(tmp_path / "runs"))
    assert (config.train.max_steps, config.tuning.lora.r, config.data.val_path) == (5, 8, "v.jsonl")
    rows = Path(config.data.train_path)
    assert rows.parent == folder / ".given" and asked_name(str(rows)) == "3 rows from Python"
    assert [json.loads(line) for line in rows.read_text().splitlines()] == ROWS
    assert write_given(settings, ROWS[:2], folder) and rows.exists()  # an earlier run may need it
    again = load_config(write_given({"train.epochs": 3.0}, "other.jsonl", folder, "configs/demo.yaml")).config
    assert (again.data.train_path, again.train.epochs, again.model.name) == (
        "other.jsonl",
        3.0,
        "builtin:demo",
    )


def test_a_dataset_is_taken_as_it_is(tmp_path):
    from datasets import Dataset

    config = load_config(write_given({"model.name": "m"}, Dataset.from_list(ROWS), tmp_path / "mine")).config
    assert [json.loads(line) for line in Path(config.data.train_path).read_text().splitlines()] == ROWS


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            (row for row in ROWS),
            r"found a generator; turn an iterator into a list: list\(...\)",
        ),
        ([], "expected rows, found none"),
        ({"train": ROWS}, r"found a dict of train; give one of them"),
        ([*ROWS, "text"], "row 4 is text; expected a dict"),
        ([*ROWS, {"text": "a"}], "row 4 has the keys text, and row 1 those of the format question_answer"),
        ([{"question": {1}, "answer": ""}], "row 1 cannot be written as JSON"),
    ],
)
def test_what_is_no_list_of_rows_is_refused(tmp_path, monkeypatch, data, said):
    monkeypatch.chdir(tmp_path)
    for command in (sft.plan, sft.train):
        with pytest.raises(ConfigError, match=said):
            command(model="m", data=data)
    with pytest.raises(DataError, match="no format has the keys foo"):
        sft.train(model="m", data=[{"foo": 1}])
    assert not list(tmp_path.rglob("*.jsonl"))


def test_a_call_that_is_refused_leaves_nothing_of_what_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in (sft.plan, sft.train):
        with pytest.raises(DataError, match="'missing.jsonl' does not exist"):
            command(model="builtin:tiny", data="missing.jsonl")
        with pytest.raises(ConfigError, match="max_steps: input should be greater than 0"):
            command(model="builtin:tiny", data=ROWS, max_steps=0)
        assert not list(tmp_path.glob("runs/*"))


def test_rows_without_a_model_or_nothing_at_all_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="model: without a config, expected a model's name"):
        sft.train(data=ROWS)
    with pytest.raises(ConfigError, match="nothing to train; give a config, or a model and data="):
        sft.train(model="m")


def judge(answer, reference, row):
    return True


def test_functions_are_settings_by_the_names_by_which_they_are_found_again():
    assert by_name({"metrics": ["contains", judge]}) == {"eval.metrics": ["contains", f"{__name__}:judge"]}
    assert sft._checked({"eval.metrics": (judge,)}) == {"eval.metrics": [f"{__name__}:judge"]}
    for unnamed in (lambda answer, reference, row: True, judge.__get__(1), object.__eq__):
        with pytest.raises(ConfigError, match="is not found by that name, .* defines"):
            by_name({"metrics": [unnamed]})


def test_a_function_that_was_given_needs_no_naming_again_in_the_same_process(tmp_path):
    def resolved(function):
        path = tmp_path / "config.resolved.yaml"
        path.write_text(
            f"model: {{name: m}}\ndata: {{train_path: r}}\neval: {{metrics: ['{__name__}:{function}']}}\n"
        )
        return load_config(path)

    by_name({"metrics": [judge]})
    require_given(resolved("judge"))
    with pytest.raises(ConfigError, match="only if you name it too"):
        require_given(resolved("other"))


def test_what_is_called_in_this_process_is_refused_for_others(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match="called in this process, but 2 others would train; leave them out, or"
    ):
        sft.train("configs/demo.yaml", processes=2, progress=print)
    with pytest.raises(
        ConfigError, match="expected objects of transformers.TrainerCallback, found a builtin_fun"
    ):
        sft.train("configs/demo.yaml", callbacks=[print])
    with pytest.raises(ConfigError, match="^progress: expected a function of a record, found a number$"):
        sft.train("configs/demo.yaml", progress=3)


def test_a_call_in_another_thread_meanwhile_is_refused_and_one_in_the_same_is_not():
    with sft._alone(), ThreadPoolExecutor() as other:
        elsewhere = other.submit(sft.plan).exception()
        with pytest.raises(ConfigError, match="nothing to plan"):
            sft.plan()
    assert "another thread of this process plans, trains or evaluates" in str(elsewhere)
    with pytest.raises(ConfigError, match="nothing to plan"), ThreadPoolExecutor() as other:
        other.submit(sft.plan).result()


def test_the_page_of_the_api_has_every_function_and_field_with_its_meaning():
    page = python_reference()
    for heading in ("plan", "train", "evaluate", "load", "Planned", "Scores", "Answers", "Evaluation", "Run"):
        assert f"\n## {heading}\n" in page
    assert "| `loss` | `float or None` | Mean over supervised tokens, in nats. |" in page
    assert "- `callbacks`: objects of transformers.TrainerCallback" in page
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) > 15 and all(len(row) == 3 and row[2].strip(" |") for row in rows)
