"""The numbers of the README are those that its commands print, or printed when their results were kept."""

import json
import re
from pathlib import Path

import pytest
import yaml

from benchmarks.cookbook import MACHINES, MODELS
from sft_play.errors import SftPlayError
from sft_play.planning.cards import CARDS

ROOT = Path(__file__).resolve().parents[2]
TEXT = " ".join((ROOT / "README.md").read_text().split())
WORDS = {9: "nine", 11: "eleven", 12: "twelve"}


def results(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def test_models_cards_and_machines_are_counted_right():
    models = yaml.safe_load((ROOT / "configs" / "models.yaml").read_text())["models"]
    assert f"the architectures of {len(models)} models (`configs/models.yaml`" in TEXT
    assert f"on each of {WORDS[len(CARDS)]} common GPUs" in TEXT
    assert f"has {WORDS[len(MODELS)]} models on {WORDS[len(MACHINES)]} machines" in TEXT


def test_exit_codes_are_explained():
    codes = TEXT.partition("Exit codes: 0 success, 1 internal error")[2].partition("##")[0]
    kinds = SftPlayError.__subclasses__()
    silent = [kind.__name__ for kind in kinds if not re.search(rf", {kind.exit_code} [a-z]", codes)]
    assert kinds and not silent, silent


def test_the_planner_chose_as_well_as_it_says():
    found = results("planner_cpu")
    regrets = [one["regret"] for one in found["summary"]]
    rounds = {one["rounds"] for one in found["summary"]}
    assert rounds == {3} and f"every plan of {len(regrets)} small workloads three times" in TEXT
    assert f"off by {found['error_median']:.0%} (median)" in TEXT
    assert f"the fastest in {regrets.count(0.0)} of them and at most {max(regrets):.1%} slower" in TEXT


@pytest.mark.parametrize(
    ("name", "contestants"),
    [
        ("**SFT-Play, its own plan**", ["sft-play"]),
        ("SFT-Play, packed", ["sft-play packed"]),
        ("bare PyTorch loop, batches of similar length", ["bare loop by length"]),
        ("bare PyTorch loop, random batches", ["bare loop"]),
        ("torchtune 0.6.1 / packed", ["torchtune", "torchtune packed"]),
        ("LitGPT 0.5.13", ["litgpt"]),
        ("LLaMA-Factory 0.9.5 / neat packing", ["llama-factory", "llama-factory packed"]),
        ("TRL 1.16.0 / packed", ["trl", "trl packed"]),
    ],
)
def test_the_speed_next_to_other_toolkits_is_what_was_measured(name, contestants):
    formats = {"tokens_per_second": "{:,.0f}", "padding_share": "{:.0%}", "loss": "{:.3f}"}
    cells = []
    for data, keys in (("gsm8k", list(formats)), ("tailed", ["tokens_per_second", "padding_share"])):
        measured = {one["contestant"]: one for one in results("peers_cpu")["results"][data]}
        runs = [measured[one] for one in contestants]
        cells += [" / ".join(formats[key].format(run[key]) for run in runs) for key in keys]
    shown = TEXT.partition(f"| {name} | ")[2].split(" | ")[:5]
    assert [cell.strip("*| ") for cell in shown] == cells


def test_a_start_takes_as_long_as_it_says():
    took = {one["contestant"]: one["start_up_seconds"] for one in results("peers_cpu")["results"]["gsm8k"]}
    for name, said in {
        "sft-play": "{:.0f} s to the end of the first step",
        "litgpt": "against {:.0f} to",
        "torchtune": "{:.0f} s (LitGPT, torchtune)",
        "llama-factory": "{:.0f} s (LLaMA-Factory)",
        "trl": "{:.0f} s (TRL)",
        "bare loop by length": "bare loops take {:.0f} and",
        "bare loop": "and {:.0f} s. The same run",
    }.items():
        assert said.format(took[name]) in TEXT
    own = results("start_up_cpu")["medians"]
    sooner = own["sft-play"]["start_up_seconds"] - own["sft-play, the same run again"]["start_up_seconds"]
    assert f"starts {sooner:.0f} s sooner the second time" in TEXT
