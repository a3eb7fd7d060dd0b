from pathlib import Path

import pytest

from sft_play.config.load import ResolvedConfig, dump_resolved, load_config
from sft_play.config.resolved import Setting, read_resolved
from sft_play.config.schema import RunConfig


def read(text: str, folder: Path) -> dict[str, Setting]:
    file = folder / "config.resolved.yaml"
    file.write_text(text)
    return read_resolved(file)


def test_values_and_origins_come_back_as_they_were_written(tmp_path):
    tree = {"model": {"name": "a  # b"}, "data": {"train_path": "x", "system_prompt": 'a "q": \n1'}}
    config = RunConfig.model_validate(tree)
    origins = {"model.name": "my runs/x # y.yaml", "tuning.lora.r": "override"}
    settings = read(dump_resolved(ResolvedConfig(config, origins, Path("x"))), tmp_path)
    assert settings["model.name"] == Setting("a  # b", "my runs/x # y.yaml")
    assert settings["data.system_prompt"].value == 'a "q": \n1'
    assert settings["tuning.lora.r"] == Setting(16, "override")
    assert settings["output.dir"] == Setting("runs", "default")
    assert RunConfig.model_validate(config.model_dump()).model_dump()["train"].keys() == {
        name.removeprefix("train.") for name in settings if name.startswith("train.")
    }


def test_lines_that_it_cannot_have_written_are_skipped(tmp_path):
    text = "a:\n  b: nope  # x\n- c\n  d: 1  # file\n\x00"
    assert read(text, tmp_path) == {"a.d": Setting(1, "file")}
    assert read_resolved(tmp_path / "missing.yaml") == {}


@pytest.mark.parametrize(
    "typed", ["runs/new/config.resolved.yaml", "config.resolved.yaml", "../new/config.resolved.yaml"]
)
def test_the_config_of_a_run_that_was_renamed_is_that_of_the_folder_it_is_in(tmp_path, monkeypatch, typed):
    folder = tmp_path / "runs" / "new"
    folder.mkdir(parents=True)
    tree = {
        "model": {"name": "m"},
        "data": {"train_path": "x"},
        "output": {"name": "old", "dir": "elsewhere"},
    }
    resolved = ResolvedConfig(RunConfig.model_validate(tree), {}, Path("x"))
    (folder / "config.resolved.yaml").write_text(dump_resolved(resolved))
    monkeypatch.chdir(tmp_path if typed.startswith("runs") else folder)
    output = load_config(typed).config.output
    assert (output.name, output.dir) == ("old", "elsewhere")  # a copy of a config, in which no run has begun
    (folder / "plan.json").touch()
    output = load_config(typed).config.output
    assert (output.name, Path(output.dir).resolve()) == ("new", tmp_path / "runs")
    assert load_config(typed, ["output.name=other"]).config.output.name == "other"
