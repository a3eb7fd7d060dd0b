"""The example notebook runs from its first cell to its last, and shows what it says."""

import ast
import json
from pathlib import Path

import pytest
from transformers import TrainerCallback

from sft_play import api
from sft_play.commands import judges
from sft_play.errors import CheckpointError, ConfigError
from tests.conftest import REPOSITORY

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]

NOTEBOOK = json.loads((REPOSITORY / "examples" / "quickstart.ipynb").read_text())
CELLS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
# The same demo, with a random model in place of the one that takes half a minute to make; and a plan for another
# model. Both are those of test_wheel.py, so that their steps are traced once.
SHORT = '"train.max_steps": 2, "train.logging_steps": 1, "eval.generate": False, "model.name": "builtin:tiny"'
CHANGES = {'"train.max_steps": 50': SHORT, '"qwen3-0.6b"': '"qwen3-8b"'}


def executed(cell: str, names: dict) -> object:
    """Runs a cell as a notebook does, and returns what its last line would show."""
    *body, last = ast.parse(cell).body
    shows = isinstance(last, ast.Expr)
    exec(compile(ast.Module(body if shows else [*body, last], []), "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if shows else None


@pytest.mark.thorough
def test_the_notebook_runs_and_shows_what_it_promises(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    cells = CELLS
    for asked, changed in CHANGES.items():
        cells = [cell.replace(asked, changed) for cell in cells]
        assert sum(changed in cell for cell in cells) == 1
    shown = [executed(cell, names) for cell in cells]
    _, planned, numbers, _, run, scores, losses, weights = shown
    assert "fits on" in planned._repr_html_() and "RTX 4090" in str(planned)
    assert (
        numbers[0] >= 1 and 1 < numbers[1] < 24 and numbers[2].startswith(("make train ", "sft-play train "))
    )
    assert run.path.resolve() == tmp_path / "runs" / "notebook" and "loss" in run._repr_html_()
    assert scores[0] == "done" and scores[1] > 0 and scores[2]["loss"] > 0
    assert [step for step, _ in losses] == [1, 2]
    assert (weights / "adapter_model.safetensors").is_file()


def test_what_is_asked_wrongly_is_an_exception(tmp_path):
    with pytest.raises(ConfigError, match="nothing to plan"):
        api.plan()
    with pytest.raises(ConfigError, match="expected a whole number"):
        api.plan("qwen3-8b", gpu="L40S", gpus=0)
    with pytest.raises(ConfigError, match="train.learning_rate"):
        api.train("configs/demo.yaml", settings={"train.learning_rate": "fast"})
    with pytest.raises(CheckpointError, match="does not exist"):
        api.load("nothing", runs=tmp_path)
    with pytest.raises(AttributeError, match="no attribute 'fit'"):
        api.fit  # noqa: B018


def length(answer, reference, row):
    """A metric: an answer's length in words; it needs the row's reference."""
    assert row["messages"][-1]["content"] == reference
    return len(answer.split())


class Steps(TrainerCallback):
    """Counts the steps that it sees."""

    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, **_):
        self.seen.append(state.global_step)


@pytest.mark.thorough
def test_rows_of_a_list_are_trained_on_without_a_config(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"w{i} w1", "answer": f"w{i}"} for i in range(40)]
    given = dict(
        model=tiny_model,
        data=rows,
        max_steps=2,
        effective_batch_size=4,
        eval_limit=2,
        max_new_tokens=4,
        val_fraction=0.2,
        chat_template="plain",
        metrics=["exact_match", length],
        callbacks=[steps := Steps()],
        progress=(records := []).append,
    )
    run = api.train(**given, output_name="mine")
    assert steps.seen == [1, 2] and records == run.metrics  # the probe's steps are not among them
    assert run.before.answers == 2 and run.before.loss > 0
    assert set(run.after.metrics) == {"exact_match", "length"} and run.after.metrics["length"] >= 0
    assert [set(sample.right) for sample in run.samples] == [{"before", "after"}] * 2
    assert api.evaluate("mine", limit=1).answers  # by the function that this process has trained with
    elsewhere = "names .*:length, and code that the folder of a run names is run only"
    with monkeypatch.context() as other_process, pytest.raises(ConfigError, match=elsewhere):
        other_process.setattr(judges, "_handed_over", set())
        api.evaluate("mine", limit=1)
    found = api.evaluate(run, limit=1, metrics=[length])
    assert found.models["adapter"].metrics["length"] == len(found.answers[0].texts["adapter"].split())
    assert found.answers[0].right == {"base": None, "adapter": None} and set(found.models) == {
        "base",
        "adapter",
    }
    assert run.path == Path("runs/mine") and run.summary["status"] == "done"
    assert (run.weights / "adapter_model.safetensors").is_file()
    assert api.train(**given, output_name="mine", resume=True).summary == run.summary  # it is finished
    assert api.plan(**given, gpu="RTX 4090").plan["total_steps"] == 2
