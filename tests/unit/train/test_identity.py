"""A run continues from a checkpoint of the same run; what has changed is shown, and refused unless allowed."""

from dataclasses import replace
from pathlib import Path

import pytest

from sft_play.config.load import ResolvedConfig
from sft_play.config.schema import RunConfig
from sft_play.data.prepare import PreparedData
from sft_play.errors import ConfigError
from sft_play.job import Job
from sft_play.manifest import write_manifest
from sft_play.runlog import RunDir
from sft_play.train.resume import differences, require_same_run, settings_of
from tests.plans import plan_with
from tests.unit.train.plans import PLAN


def job_of(folder: Path, rows: str = "one", plan=PLAN, **changes) -> Job:
    tree = {"model": {"name": "/models/base"}, "data": {"train_path": "d"}}
    for name, value in changes.items():
        section, key = name.split("__")
        tree.setdefault(section, {})[key] = value
    cache = folder / rows
    cache.mkdir(exist_ok=True)
    write_manifest(cache, {}, {"train.arrow": {"bytes": 1, "sha256": [rows]}})
    data = PreparedData(None, None, None, 64, {}, cache)
    resolved = ResolvedConfig(RunConfig.model_validate(tree), {}, Path("test"))
    return Job(resolved, RunDir(folder), None, None, data, None, plan)


@pytest.fixture
def saved(tmp_path):
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    write_manifest(folder, {"settings": settings_of(job_of(tmp_path))}, {})
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model__name": "/elsewhere/base", "output__name": "moved", "train__save_steps": 7},
        {"train__batch_size": 2, "parallel__engine": "ddp", "eval__limit": 3, "train__report_to": []},
        {"plan": plan_with(PLAN, world_size=4, engine="deepspeed_z2", micro_batch_size=1)},
    ],
)
def test_what_does_not_decide_the_result_may_change(tmp_path, saved, changes):
    assert require_same_run(job_of(tmp_path, **changes), saved) == []


@pytest.mark.parametrize(
    ("changes", "name", "shown"),
    [
        ({"plan": plan_with(PLAN, learning_rate=0.5)}, "train.learning_rate", "0.0001 -> 0.5"),
        ({"plan": plan_with(PLAN, total_steps=9)}, "train.max_steps", "2 -> 9"),
        ({"plan": plan_with(PLAN, effective_batch_size=4)}, "train.effective_batch_size", "8 -> 4"),
        ({"train__seed": 1}, "train.seed", "0 -> 1"),
        ({"rows": "two"}, "data.train_path", "the rows are not the same"),
    ],
)
def test_a_change_is_shown_and_refused_unless_it_is_allowed(tmp_path, saved, changes, name, shown):
    with pytest.raises(ConfigError, match=f"{name}: {shown}\n.*ALLOW={name}"):
        require_same_run(job_of(tmp_path, **changes), saved)
    allowed = job_of(tmp_path, **changes, train__allow_changed=[name])
    assert require_same_run(allowed, saved) == [f"{name}: {shown}"]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"model__name": "/models/other"}, "model.name"),
        ({"model__new_tokens": ["<tool>"]}, "model.new_tokens"),
        ({"tuning__lora": {"r": 3}}, "tuning.lora.r"),
        ({"tuning__lora": {"modules_to_save": ["norm"]}}, "tuning.lora.modules_to_save"),
        ({"tuning__mode": "full"}, "tuning.mode"),
        ({"train__optimizer": "adamw_8bit"}, "train.optimizer"),
    ],
)
def test_what_the_state_does_not_fit_cannot_be_allowed(tmp_path, saved, changes, name):
    job = job_of(tmp_path, **changes)
    with pytest.raises(
        ConfigError, match=rf"{name}: .*\n.*start a new run \(RUN=<name>\): {name} cannot change"
    ):
        require_same_run(job, saved)


def test_a_name_that_is_not_compared_cannot_be_allowed(tmp_path, saved):
    with pytest.raises(ConfigError, match="train.lr is not compared; allowed: .*train.learning_rate"):
        require_same_run(job_of(tmp_path, train__allow_changed=["train.lr"]), saved)


def test_other_versions_of_libraries_are_shown(tmp_path):
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    write_manifest(folder, {"settings": {}, "versions": {"torch": "1.0", "gone": "2"}}, {})
    lines = require_same_run(job_of(tmp_path), folder)
    assert lines[0].startswith("torch: 1.0 -> 2") and lines[1] == "gone: 2 -> none"


def test_a_checkpoint_of_an_earlier_version_is_not_compared(tmp_path):
    assert require_same_run(job_of(tmp_path, train__seed=5), tmp_path / "none") == []


def test_adapters_that_start_from_weights_stay_on_the_kind_of_device_that_computed_them(tmp_path):
    changes = {"tuning__lora": {"init": "pissa"}}
    found = [
        settings_of(job_of(tmp_path, plan=replace(PLAN, device=device), **changes))
        for device in ("cpu", "cuda")
    ]
    assert differences(*found) == {"tuning.lora.init": "pissa on cpu -> pissa on cuda"}
