"""A profile that lies by a thousand times is refuted by the first real step: not believed, nor printed."""

from dataclasses import replace

import pytest

from sft_play.machine.gpus import detect
from sft_play.planning.budget import training_threads
from sft_play.planning.speed.devices import derived_profile, device_name, read_profile, write_profile
from sft_play.planning.speed.profile import SIDES, ProductGrid
from sft_play.runlog import RunDir, read_json
from sft_play.units import format_duration
from tests.integration.cli import make_workspace, sft

pytestmark = [pytest.mark.integration, pytest.mark.thorough]
STEPS = 24


def long_for_many_rows(m, n, k):
    """Seconds of a product: ten and more, where microseconds are true, and most for many tokens."""
    return 10.0 * (m / 8) ** 2


@pytest.fixture
def lie(tmp_path, make_cache, monkeypatch):
    """Writes such a profile for so many processes; of a CPU's products of 16 bits, nothing contradicts it."""
    monkeypatch.setenv("SFT_PLAY_CACHE", str(make_cache(tmp_path / "cache")))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def write(processes):
        machine = detect()
        true, threads = derived_profile(machine, processes), training_threads(machine, processes)
        products = true.products | {"bfloat16": ProductGrid.of(SIDES["cpu"], long_for_many_rows)}
        profile = replace(true, measured=True, source="a lie", products=products)
        write_profile(device_name(machine), threads, profile)
        return lambda: read_profile(device_name(machine), threads)

    return write


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_plan_is_chosen_again_by_what_a_step_took(tiny_model, tmp_path, lie, processes):
    config, profile = make_workspace(tmp_path / "work", tiny_model), lie(processes)
    words = ("train.batch_size=auto", "train.effective_batch_size=16", f"train.max_steps={STEPS}")
    more = ("train.mixed_precision=bf16", "train.probe=true", "eval.generate=false")
    done = sft("train", "--processes", str(processes), "--config", config, *words, *more)
    assert done.code == 0, done.err
    said, run = " ".join(done.out.split()), RunDir(config.parent / "runs" / "one")
    plan, summary = read_json(run.plan)["plan"], read_json(run.summary)
    assert "micro-batch 1 x" in said and "tried micro-batch" in said  # the lie's choice, and the other one
    wrong = f"the plan's {format_duration(plan['refuted_seconds'])} was wrong, its profile is measured again"
    assert said.count(wrong) == 2 and "% too" not in said.split("step took")[-1].split("memory")[0]
    assert plan["refuted_seconds"] > 10 * plan["step_seconds"] and plan["step_seconds_origin"] == "probe"
    assert plan["step_seconds"] == summary["predicted_step_seconds"] == summary["probe"]["step_seconds"]
    assert plan["micro_batch_size"] == summary["micro_batch_size"] and plan["effective_batch_size"] == 16
    assert profile() is None
