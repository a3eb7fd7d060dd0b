"""Metrics of one's own are called with each answer, and what is wrong with one is said with its row."""

import pytest
import torch

from sft_play.commands.answers import Compared, as_written, is_right, summarise_answers
from sft_play.commands.judges import judged, judges, require_given, try_judges
from sft_play.config.load import dump_resolved, load_config
from sft_play.errors import ConfigError

CODE = """
import torch
def longer(answer, reference, row):
    return len(answer) - len(reference)
def polite(answer, reference, row):
    return torch.tensor("please" in answer.lower())
def fails(answer, reference, row):
    return row["messages"][0]["points"]
def said(answer, reference, row):
    return "good"
number = 5
"""
ROW = {"messages": [{"role": "user", "content": "q"}], "tools": None, "source": "rows.jsonl:3"}
ASKED = [Compared("Please!", "no", row=ROW), Compared("ab", "abc", row=ROW)]


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module in the folder in which a command is typed."""
    monkeypatch.chdir(tmp_path)
    name = f"judge_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(CODE)
    return name


def test_a_function_in_this_folder_judges_answers_under_its_own_name(module):
    names = ("exact_match", f"{module}:longer", f"{module}:polite")
    found = judges(names)
    assert list(found) == ["longer", "polite"]
    assert judged("longer", found["longer"], ASKED) == [5, -1]
    polite = judged("polite", found["polite"], ASKED)
    assert polite == [True, False] and all(type(value) is bool for value in polite)
    scores = [
        {"exact_match": None, "longer": 5, "polite": True},
        {"exact_match": None, "longer": -1, "polite": False},
    ]
    assert [is_right(each, names) for each in scores] == [True, False]
    written = as_written(summarise_answers(ASKED, scores), names)
    assert written["own_metrics"] == {"longer": 2.0, "polite": 0.5} and "longer" not in written


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("fails", r"fails on the row rows.jsonl:3: KeyError: 'points'. It was tried with a reference"),
        ("said", "TypeError: it returned 'good'; expected a number, or true or false"),
        ("number", "the module judge_.* has no function number"),
        ("other", "has no function other"),
    ],
)
def test_a_function_is_tried_before_a_model_is_loaded(module, function, said):
    with pytest.raises(ConfigError, match=said):
        try_judges([f"{module}:{function}"], ASKED[0])


def test_a_module_that_cannot_be_imported_is_named_with_the_reason(module, tmp_path):
    with pytest.raises(
        ConfigError, match="no_such:f: importing no_such fails with ModuleNotFoundError: .*run the"
    ):
        judges(["no_such:f"])
    (tmp_path / f"{module}_b.py").write_text("1 / 0")
    with pytest.raises(ConfigError, match="fails with ZeroDivisionError: division by zero"):
        judges([f"{module}_b:f"])


def test_answers_that_a_function_fails_on_have_no_score_and_the_first_is_shown(module, capsys):
    (judge,) = judges([f"{module}:fails"]).values()
    known = Compared("a", "b", row={**ROW, "messages": [{"points": torch.tensor(2.5)}]})
    assert judged("fails", judge, [ASKED[0], known, ASKED[1]]) == [None, 2.5, None]
    text = " ".join(capsys.readouterr().out.split())
    assert "fails on the row rows.jsonl:3: KeyError: 'points'; 2 of 3 answers have no fails" in text


CONFIG = "model: {name: m}\ndata: {train_path: rows.jsonl}\neval: {metrics: [exact_match, 'judge:polite']}\n"


def test_functions_that_the_folder_of_a_run_names_are_refused_unless_they_are_given_again(tmp_path):
    own = tmp_path / "my.yaml"
    own.write_text(CONFIG)
    require_given(load_config(own))
    stored = tmp_path / "runs" / "a" / "config.resolved.yaml"
    stored.parent.mkdir(parents=True)
    stored.write_text(dump_resolved(load_config(own)))
    given = tmp_path / "runs" / "a" / ".given" / "run.yaml"
    given.parent.mkdir()
    given.write_text(CONFIG)
    including = tmp_path / "other.yaml"
    including.write_text(f"include: {stored}\n")
    for path in (stored, given, including):
        with pytest.raises(
            ConfigError,
            match=r"names judge:polite, and code that the folder .*eval.metrics=\[exact_match,judge:polite\]",
        ):
            require_given(load_config(path))
        require_given(load_config(path, ["eval.metrics=[exact_match,judge:polite]"]))
        require_given(load_config(path, ["eval.metrics=[exact_match]"]))
    stored.write_text(CONFIG.replace("judge:polite", "__main__:polite"))
    with pytest.raises(ConfigError, match=r"add metrics=\[..., polite\] to sft.evaluate in the script"):
        require_given(load_config(stored))
    stored.write_text(CONFIG.replace("judge:polite", "sft_play.builtin.replies:house_style"))
    require_given(load_config(stored))  # of a config that comes with the package
    stored.write_text(CONFIG.replace("judge:polite", "sft_play.files:own_folder"))
    with pytest.raises(ConfigError, match="names sft_play.files:own_folder"):
        require_given(load_config(stored))


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        (
            "exact",
            "'exact' is not a metric; expected exact_match, .*, or a function of yours as module:function",
        ),
        ("os.system", "'os.system' is not a metric"),
        ("judge:exact_match,exact_match", "two metrics are called exact_match"),
        ("", "expected at least one metric"),
    ],
)
def test_metrics_that_there_are_not_are_refused_in_the_config(tmp_path, metrics, said):
    own = tmp_path / "my.yaml"
    own.write_text(CONFIG)
    with pytest.raises(ConfigError, match=said):
        load_config(own, [f"eval.metrics=[{metrics}]"])
