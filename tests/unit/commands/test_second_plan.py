"""A second plan of the same run is arithmetic over what the first one left on disk."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from sft_play.machine.gpus import detect
from sft_play.planning.budget import training_threads
from sft_play.planning.speed.devices import device_name, write_profile
from sft_play.planning.speed.profile import derived_from_data_sheet
from tests.conftest import REPOSITORY
from tests.unit.test_floors import HEAVY

PLAN = """\
import sys
from sft_play.cli import main
code = main({words!r})
found = sorted({unwanted!r} & set(sys.modules))
assert code == 0 and not found, found
"""
COMPILER = {"torch._inductor.compile_fx"}
FOR_OTHERS = COMPILER | {"deepspeed", "datasets", "pandas"}  # what a plan without rows has no use for


@pytest.fixture
def words(tiny_model, tmp_path, monkeypatch) -> list[str]:
    """The command line of a plan on this machine, whose speed is known."""
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    machine = detect()
    profile = derived_from_data_sheet("this one", "cpu", 1e11, 1e10)
    write_profile(device_name(machine), training_threads(machine, 1), profile)
    rows = ({"prompt": f"w{row} w1", "completion": "w2 " * (row + 1)} for row in range(12))
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tree = {
        "model": {"name": str(tiny_model)},
        "data": {"train_path": str(tmp_path / "rows.jsonl")},
        "train": {"effective_batch_size": 1, "gradient_checkpointing": False},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(tree))
    return ["plan", "--config", str(tmp_path / "run.yaml"), "--json"]


def planned(words, unwanted, **process):
    """The plan, by a process that imports nothing of what is unwanted."""
    script = PLAN.format(words=words, unwanted=unwanted)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, **process)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.thorough
def test_a_second_plan_imports_neither_torch_nor_transformers(words):
    first = planned(words, COMPILER)
    second = planned(words, HEAVY)
    assert second["plan"] == first["plan"]
    assert second["memory"]["phases"] == first["memory"]["phases"]


@pytest.mark.thorough
def test_a_plan_for_a_gpu_elsewhere_is_kept_wherever_it_is_asked_for_again(tiny_model, tmp_path):
    """Also after an install of packages that a plan does not use, as `make site` makes one."""
    environment = {name: value for name, value in os.environ.items() if name != "SFT_PLAY_CACHE"}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": f"{REPOSITORY}:{tmp_path}"}
    words = ["plan", "--model", str(tiny_model), "--gpu", "RTX 4090", "--json"]
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
    first = planned(words, FOR_OTHERS, cwd=folders[0], env=environment)
    shutil.rmtree(tmp_path / "cache" / "sft-play" / "traces")  # without steps from which to search again
    (tmp_path / "mkdocs_material-9.7.0.dist-info").mkdir()
    assert planned(words, HEAVY, cwd=folders[1], env=environment) == first
