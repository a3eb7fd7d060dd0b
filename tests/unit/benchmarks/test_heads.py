"""The output heads that are timed on a GPU compute the same loss and gradients."""

import json
from dataclasses import asdict

import pytest
import torch

from benchmarks import heads
from benchmarks.heads import HEADS, Case, inputs, outcome
from tests.triton import interpreted, needs_triton

CPU = torch.device("cpu")
# of the norm: bf16 has eight binary digits, and the logits are rounded to it before the loss
NEAR = {torch.float32: 1e-5, torch.bfloat16: 0.02}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("name", ["tiled", pytest.param("liger", marks=needs_triton)])
def test_all_compute_what_that_of_trl_does(name, dtype, trained):
    given = inputs(Case("tiny", 48, 70, 21, trained), CPU, dtype)
    expected = outcome(HEADS["trl"], given)
    with interpreted() if name == "liger" else torch.enable_grad():
        found = outcome(HEADS[name], given)
    assert len(found) == len(expected) == 2 + trained
    assert all(heads._difference(*pair) <= NEAR[dtype] for pair in zip(found, expected, strict=True))


def test_each_is_timed_and_those_that_break_say_how(monkeypatch):
    def breaks(*_):
        raise RuntimeError("no such kernel\nmore")

    (said,) = heads.sentences([heads.case(asdict(heads.QUICK[0]), "cpu")])
    assert "tiny, frozen, 24 tokens: trl " in said and "ms 0 MiB, tiled " in said and "liger" not in said
    monkeypatch.setitem(heads.HEADS, "tiled", breaks)
    (said,) = heads.sentences([heads.case(asdict(heads.QUICK[0]), "cpu")])
    assert "tiled RuntimeError: no such kernel" in said and "trl RuntimeError" not in said


@pytest.mark.slow
def test_a_case_that_is_there_is_not_measured_again(tmp_path):
    words = ["--device", "cpu", "--quick", "--results", str(tmp_path)]
    assert heads.main(words) == 0
    first = (tmp_path / "heads_gpu.json").read_text()
    assert heads.main(words) == 0 and (tmp_path / "heads_gpu.json").read_text() == first
    assert len(json.loads(first)["cases"]) == json.loads(first)["of"] == len(heads.QUICK)
