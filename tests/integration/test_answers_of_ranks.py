"""Answers before and after training, by two processes that each hold a part of the model (FSDP2)."""

import json

import pytest

from sft_play.runlog import RunDir, read_json, read_metrics
from tests.conftest import REPOSITORY
from tests.integration.cli import make_workspace, sft
from tests.integration.test_kills import launching

pytestmark = [pytest.mark.integration, pytest.mark.thorough, pytest.mark.usefixtures("one_thread")]
WORDS = ["parallel.engine=fsdp2", "train.probe=false", "train.report_to=[]", "train.max_steps=4"]
WORDS += ["parallel.timeout_s=60", "eval.samples=4", "eval.max_new_tokens=12"]
RESHARDS = {
    mode: f"parallel.reshard_after_forward={after}"
    for mode, after in (("lora", "false"), ("full", "true"), ("qlora", "auto"))
}


def curve(run: RunDir) -> list[dict]:
    """What was learned, without seconds."""
    kept = ("step", "train/loss", "eval/loss", "train/grad_norm", "train/learning_rate")
    return [{key: record.get(key) for key in kept} for record in read_metrics(run)]


def weights(run: RunDir) -> bytes:
    (file,) = [*run.adapter.glob("*.safetensors"), *run.model.glob("*.safetensors")]
    return file.read_bytes()


@pytest.fixture(scope="module")
def clean(tiny_model, tmp_path_factory):
    """`clean(mode)`: a run in which nothing goes wrong, trained once for each mode."""
    known: dict[str, RunDir] = {}

    def run(mode: str) -> RunDir:
        if mode not in known:
            folder = tmp_path_factory.mktemp(mode)
            words = [*WORDS, f"tuning.mode={mode}", RESHARDS[mode], "--processes", "2"]
            assert sft("train", "--config", make_workspace(folder, tiny_model), *words).code == 0
            known[mode] = RunDir(folder / "runs" / "one")
        return known[mode]

    return run


@pytest.mark.parametrize(
    "mode", ["lora", *(pytest.param(m, marks=pytest.mark.slow) for m in ("full", "qlora"))]
)
def test_they_are_those_of_one_process(clean, mode):
    run = clean(mode)
    words = ["--config", run.path.parents[1] / "run.yaml", *WORDS, f"tuning.mode={mode}", RESHARDS[mode]]
    summary = read_json(run.summary)
    assert sft("eval", *words, "--split", "test").code == 0
    lines = [json.loads(line) for line in run.evaluation("test").with_suffix(".jsonl").open()]
    found = [(sample["before"], sample["after"]) for sample in summary["samples"]]
    assert found == [(line["base"], line["generated"]) for line in lines]
    assert any(before != after for before, after in found)


@pytest.mark.slow  # of one process, tests/integration/test_environment.py shows it
@pytest.mark.parametrize("mode", RESHARDS)
def test_training_does_not_notice(tiny_model, tmp_path, clean, mode):
    words = [*WORDS, f"tuning.mode={mode}", RESHARDS[mode], "eval.generate=false", "--processes", "2"]
    assert sft("train", "--config", make_workspace(tmp_path, tiny_model), *words).code == 0
    silent, run = RunDir(tmp_path / "runs" / "one"), clean(mode)
    assert curve(silent) == curve(run) and weights(silent) == weights(run)


FAULTY_RANK = """\
import os, sys
sys.path.insert(0, {repository!r})
from sft_play.machine.process import die_with_parent
die_with_parent()
from sft_play.cli import run_rank
from sft_play.train import answers
from tests.integration.memory_faults import run_out

generate, calls = answers.generate, []

def failing(model, *given, **named):
    calls.append(len(given[1]))
    passes = []
    layers = [module for name, module in model.named_modules() if name.endswith("{layer}")]

    def hook(*_):
        passes.append(1)
        if len(passes) == {number} and len(given[1]) > {fits}:
            run_out()

    handle = layers[{place}].register_forward_pre_hook(hook)
    try:
        return generate(model, *given, **named)
    finally:
        handle.remove()

if os.environ["RANK"] == "{rank}":
    answers.generate = failing
raise SystemExit(run_rank(sys.argv[1:]))
"""


@pytest.mark.faults
@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.parametrize(
    ("rank", "layer", "place", "number", "fits"),
    [(1, "down_proj", 0, 1, 1), (0, "lm_head", 0, 3, 2), (1, "self_attn", -1, 2, 0)],
    ids=["first-pass", "third-pass", "never-fits"],
)
def test_processes_run_out_of_memory_together_and_training_goes_on(
    tiny_model, tmp_path, monkeypatch, clean, mode, rank, layer, place, number, fits
):
    config, run, expected = make_workspace(tmp_path, tiny_model), RunDir(tmp_path / "runs/one"), clean(mode)
    words = [*WORDS, f"tuning.mode={mode}", RESHARDS[mode], "--processes", "2"]
    fault = dict(rank=rank, layer=layer, place=place, number=number, fits=fits)
    with launching(FAULTY_RANK.format(repository=str(REPOSITORY), **fault), tmp_path, monkeypatch):
        done = sft("train", "--config", config, *words)
    assert done.code == 0, done.err
    assert curve(run) == curve(expected) and weights(run) == weights(expected)
    samples = read_json(run.summary).get("samples")
    if fits:
        assert samples == read_json(expected.summary)["samples"]
    else:
        assert samples is None and "no answers are compared: out of memory on a single row" in done.out
