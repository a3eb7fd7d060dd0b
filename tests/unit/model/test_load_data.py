"""What is checked and kept of a model and its data before any weights are loaded."""

import json
import re
import shutil
from datetime import date

import pytest

from sft_play.config.schema import ModelConfig, RunConfig
from sft_play.errors import ConfigError, DataError
from sft_play.model.load import load_data, load_tokenizer
from tests.conftest import VOCABULARY


@pytest.fixture
def load(tiny_model, tmp_path, monkeypatch):
    """`load(rows, model=..., data={...}, started=...)` loads rows for the run tmp_path/runs/run."""
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "rows.jsonl"

    def load(rows, model=None, data=None, resume="never", **settings):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        tree = {
            "model": {"name": str(tiny_model), **(model or {})},
            "data": {"train_path": str(file), **(data or {})},
            "train": {"resume": resume},
            "output": {"dir": str(tmp_path / "runs"), "name": "run"},
        }
        return load_data(RunConfig.model_validate(tree), progress=False, **settings)

    return load


@pytest.mark.parametrize("name", ["pad_token", "bos_token", "eos_token"])
def test_a_token_that_the_model_has_no_row_for_is_refused_before_rows_are_read(
    load, tiny_model, tmp_path, name
):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    tokenizer = load_tokenizer(ModelConfig(name=str(folder)))
    tokenizer.add_special_tokens({name: "<new>"})
    tokenizer.save_pretrained(folder)
    rows = [{"question": "w1", "answer": 5}]  # an error, if they are read
    said = (
        f"model.name: the {name} of the tokenizer of '{folder}' is '<new>', token {VOCABULARY}, but the model "
        f"has only the tokens 0 to {VOCABULARY - 1}"
    )
    with pytest.raises(ConfigError, match=re.escape(said)) as error:
        load(rows, {"name": str(folder)})
    assert "resize_token_embeddings(len(tokenizer))" in str(error.value)
    assert ("set pad_token to '<eos>' in tokenizer_config.json" in str(error.value)) == (name == "pad_token")
    with pytest.raises(DataError, match="answer is 5"):  # the rows for a new token are enough for both
        load(rows, {"name": str(folder), "new_tokens": ["<more>"]})


def test_the_rows_of_a_resumed_run_have_the_day_on_which_it_began(load, tmp_path):
    template = tmp_path / "dated.jinja"
    template.write_text(
        "{{ strftime_now('w%y') }} {% for m in messages %}{{ m.content }} {{ eos_token }} {% endfor %}"
    )
    rows = [{"question": f"w{number}", "answer": "w2"} for number in range(20)]
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)

    def loaded(**settings):
        return load(rows, data={"chat_template": str(template)}, **settings).rows

    def day(**settings):
        return loaded(**settings).stats["rendered_as_of"]

    new = day(resume="auto")
    assert new >= str(date(2026, 1, 1)) and day(started=True) >= new
    (run / "data.json").write_text('{"rendered_as_of": "2024-02-29"}')
    checkpoint = str(run / "checkpoints" / "checkpoint-2")
    assert {day(resume="auto"), day(resume=checkpoint), day(started=True)} == {"2024-02-29"}
    assert day(resume="never") >= new
    first = loaded(resume="auto").digests()
    shutil.rmtree(tmp_path / "cache")
    assert loaded(resume="auto").digests() == first != loaded(resume="never").digests()
