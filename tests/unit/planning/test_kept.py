"""What was found about a request is found again, and never where something that it depends on is another."""

from dataclasses import replace

import pytest
from transformers import LlamaConfig

from sft_play.cache import entry, write_value
from sft_play.config.schema import RunConfig
from sft_play.machine.gpus import what_if
from sft_play.planning.answers.kept import kept
from sft_play.planning.request import Request
from sft_play.planning.rows.facts import DataFacts
from sft_play.sizing.facts.architecture import Architecture

MODEL = Architecture.of(LlamaConfig(num_hidden_layers=2))
OTHER = Architecture.of(LlamaConfig(num_hidden_layers=3))
RUN = RunConfig.model_validate({"model": {"name": "some/model"}, "data": {"train_path": "x"}})
ASKED = Request(RUN, MODEL, DataFacts.full_rows(64, 0), what_if("T4"), 1)


@pytest.fixture(autouse=True)
def _empty(tmp_path, monkeypatch):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def again(request: Request, *about: object) -> bool:
    """Whether the question is answered without looking."""
    looked = []
    answer = kept("what?", request, *about, find=lambda: looked.append(1) or {"found": None, "of": [1, 2]})
    assert answer == {"found": None, "of": [1, 2]}
    return not looked


def test_the_same_question_is_answered_as_it_was_before():
    assert [again(ASKED), again(replace(ASKED)), again(ASKED, "about more")] == [False, True, False]


@pytest.mark.parametrize(
    "changed",
    [
        ASKED.changed({"tuning.mode": "qlora"}),
        ASKED.changed(facts=DataFacts.full_rows(65, 0)),
        ASKED.changed(facts=replace(ASKED.facts, supervised=ASKED.facts.supervised - 1)),
        ASKED.changed(machine=what_if("L4")),
        ASKED.changed(architecture=OTHER),
        ASKED.changed(budget_bytes=2**30),
        ASKED.on_gpus(2),
    ],
    ids=["settings", "rows", "supervised", "gpu", "architecture", "budget", "gpus"],
)
def test_another_request_is_another_question(changed):
    assert not again(ASKED) and not again(changed) and again(ASKED)


def test_a_price_and_what_a_run_has_measured_ask_anew(tmp_path):
    assert not again(ASKED) and again(ASKED)
    (tmp_path / "sft-play").mkdir()
    (tmp_path / "sft-play" / "prices.yaml").write_text("T4: 0.5")
    assert not again(ASKED) and again(ASKED)
    for ratio in (1.1, 1.2):
        write_value(entry("probes", "a run"), {"ratios": {"forward": ratio}})
        assert not again(ASKED) and again(ASKED)


def test_what_depends_on_this_machine_or_on_a_models_own_code_is_looked_at_each_time():
    here = replace(ASKED, machine=replace(ASKED.machine, what_if=False))
    own = ASKED.changed(architecture=Architecture(MODEL.text, lambda: MODEL.config, keeps=False))
    assert not any(again(each) for each in (here, here, own, own))
