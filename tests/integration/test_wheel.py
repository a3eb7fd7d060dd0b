"""The wheel works in an empty folder, apart from the repository: commands, data files, ranks, the API."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

pytestmark = pytest.mark.integration

SHORT = ["model.name=builtin:tiny", "train.max_steps=2", "train.probe=false", "eval.generate=false"]
API = """\
import sys
import sft_play.api as sft
assert not {"torch", "transformers"} & set(sys.modules)
run = sft.load("demo")
assert run.summary["status"] == "done" and len(run.metrics) > 0 and "<iframe" in run._repr_html_()
print(sft.__file__)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The `bin` of an environment with the wheel, and with the packages of this one but for SFT-Play."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    shutil.copytree(
        REPOSITORY / "sft_play", source / "sft_play", ignore=shutil.ignore_patterns("__pycache__")
    )
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source]
    subprocess.run([*pip, *build], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    purelib = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = Path(subprocess.run(purelib, check=True, capture_output=True, text=True).stdout.strip())
    # a path in a .pth file: what is in it can be imported, and its own .pth files, the editable install, do not count
    (own / "packages.pth").write_text(sysconfig.get_path("purelib"))
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel], check=True)
    return python.parent


@pytest.fixture(scope="module")
def empty(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("empty")


@pytest.fixture
def typed(installed, empty):
    """Runs the `sft-play` of the wheel in the empty folder, as nobody's child."""
    kept = {name: os.environ[name] for name in os.environ if name not in {"PYTHONPATH", "SFT_PLAY_MAKE"}}
    values = {**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}

    def run(*words: str, code: int = 0, program: str = "sft-play") -> subprocess.CompletedProcess:
        command = [str(installed / program), *words]
        done = subprocess.run(command, cwd=empty, env=values, capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run


@pytest.mark.thorough
def test_a_plan_for_a_gpu_that_is_not_here(typed):
    plan = json.loads(
        typed("plan", "--model", "qwen3-8b", "--gpu", "RTX 4090", "--json", "tuning.mode=lora").stdout
    )
    assert plan["plan"]["micro_batch_size"] >= 1 and plan["memory"]["peak_bytes"] > 2**33
    assert plan["command"].startswith("sft-play train --config configs/run_lora.yaml ")


@pytest.mark.thorough
def test_init_writes_a_config_once_that_editors_and_the_tool_understand(typed, empty):
    said = typed("init", "first.yaml").stdout
    assert "next        sft-play prepare --show 3 --config first.yaml" in said
    assert "sft-play check --config first.yaml" in said
    text = (empty / "first.yaml").read_text()
    schema = Path(text.splitlines()[0].partition("$schema=")[2])
    assert json.loads(schema.read_text())["properties"]["model"]
    assert "make " not in text and "sft-play train --config first.yaml" in text
    again = typed("init", "first.yaml", code=2).stderr
    assert (
        again.startswith("error: first.yaml exists and will not be overwritten")
        and (empty / "first.yaml").read_text() == text
    )
    missing = typed("prepare", "--config", "first.yaml", "model.name=builtin:tiny", code=3).stderr
    assert "data/train.jsonl" in missing and "make" not in missing


@pytest.mark.thorough
def test_the_demo_runs_and_what_it_made_can_be_loaded(typed, installed):
    said = typed("demo", *SHORT).stdout
    assert "sft-play infer --config runs/demo/config.resolved.yaml" in said and "make " not in said
    where = typed("-c", API, program="python").stdout.strip()
    assert Path(where).is_relative_to(installed.parent)


@pytest.mark.slow
def test_ranks_of_several_processes_are_started_from_the_package(typed):
    typed("train", "--config", "configs/demo.yaml", "--processes", "2", *SHORT, "output.name=two")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tran"], "Did you mean 'train'?"),
        (["train", "--confg", "x"], "Did you mean '--config'?"),
        (["train", "--config", "configs/dmeo.yaml"], "did you mean configs/demo.yaml?"),
        (["eval", "--config", "configs/demo.yaml", "output.name=none"], "sft-play train --config configs/demo.yaml output.name=none"),
        (["plan", "--model", "qwn3-8b", "--gpu", "L40S"], "--model qwn3-8b is unknown; closest: Qwen/Qwen3-8B"),
    ],
)  # fmt: skip
def test_errors_speak_of_commands_and_flags(typed, words, said):
    code = 8 if words[0] == "eval" else 2
    found = typed(*words, code=code).stderr
    assert said in found and "make " not in found and "CONFIG" not in found


def test_the_shell_completes_commands(installed, empty):
    asked = {"_SFT_PLAY_COMPLETE": "bash_complete", "COMP_WORDS": "sft-play tr", "COMP_CWORD": "1"}
    done = subprocess.run([installed / "sft-play"], cwd=empty, env=asked, capture_output=True, text=True)
    assert done.stdout == "plain,train\n"
