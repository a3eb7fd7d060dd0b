"""The guides cannot rot: every command in them is run here, on the CPU, with a tiny config in place of theirs.

Not run but looked at (make -n, bash -n): lines that say "needs GPUs" or "needs answers", and sections about several machines,
which have tests of their own (make test-cluster). A command that comes twice, with whatever config, is run once.
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import REPOSITORY
from tests.integration.cli import make_workspace

pytestmark = pytest.mark.integration

GUIDES = ("MULTI_GPU_GUIDE.md", "ACCELERATE_SETUP.md")
MARKS = ("needs GPUs", "needs answers")
OTHER_LANGUAGES = ("text", "yaml")
CLUSTER = re.compile(r"machines|slurm", re.IGNORECASE)
TRAINING = re.compile(r"make train|train_distributed\.py|train_multi_gpu\.sh")


class Command(NamedTuple):
    """One line of a block, and whether it is run or only looked at."""

    text: str
    runs: bool


def commands_of(guide: str) -> list[Command]:
    """The commands of all blocks, lines joined where they end in a backslash."""
    section, language, found, pending = "", None, [], ""
    for line in (REPOSITORY / guide).read_text().splitlines():
        if line.startswith("```"):
            language = None if language is not None else line[3:].strip() or "bash"
        elif language is None and line.startswith("#"):
            section = line
        elif language == "bash" and line.strip():
            pending += line
            if pending.endswith("\\"):
                pending = pending[:-1]
                continue
            runs = not any(mark in pending for mark in MARKS) and not CLUSTER.search(section)
            text = re.split(r"\s+#(?=\s)", pending)[0]
            found.append(Command(" ".join(re.sub(r"\bCONFIG=\S+", "", text).split()), runs))
            pending = ""
        elif language is not None:
            assert language in ("bash", *OTHER_LANGUAGES), f"{guide}: a block of {language!r}"
    return found


ALL = [(guide, command) for guide in GUIDES for command in commands_of(guide)]
EXECUTED = list(dict.fromkeys(command.text for _, command in ALL if command.runs))
LOOKED_AT = list(dict.fromkeys(command.text for _, command in ALL if not command.runs))


class Place(NamedTuple):
    """Where the guides' commands run: a copy of what they name, a home, an environment that is installed already."""

    folder: Path
    config: Path
    environment: dict[str, str]


@pytest.fixture(scope="module")
def place(tiny_model, tmp_path_factory) -> Place:
    folder = tmp_path_factory.mktemp("guides")
    for name in ("Makefile", "configs", "scripts", "requirements.lock", "pyproject.toml", "sft_play", "benchmarks"):
        (folder / name).symlink_to(REPOSITORY / name)
    venv = folder / ".venv"
    venv.mkdir()
    for name in ("bin", "lib", "include", "pyvenv.cfg"):
        (venv / name).symlink_to(Path(sys.prefix) / name)
    (venv / ".ready").touch()  # nothing is installed
    (folder / "home" / ".cache").mkdir(parents=True)
    (folder / "home" / ".cache" / "torch_extensions").symlink_to(
        Path("~/.cache/torch_extensions").expanduser()
    )  # compiled once
    config = make_workspace(folder / "work", tiny_model)
    text = config.read_text().replace("max_steps: 8", "max_steps: 2").replace("  max_new_tokens: 6", "  generate: false")
    config.write_text(text)
    inherited = {name: os.environ[name] for name in os.environ.keys() - {"MAKEFLAGS", "MAKELEVEL", "HF_HOME", "XDG_CACHE_HOME"}}
    environment = {
        **inherited,
        "HOME": str(folder / "home"), "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}", "CONFIG": str(config),
        "PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    return Place(folder, config, environment)


def on_the_cpu(text: str, config: Path) -> str:
    """The command as it can run here: our config for theirs, CPU files for those of GPUs."""
    text = re.sub(r"configs/(run_\w+|demo)\.yaml", str(config), text)
    text = re.sub(r"configs/accelerate/(ddp|zero2)\.yaml", r"configs/accelerate/\1_cpu.yaml", text)
    if text.startswith("make bench-scaling"):
        text = 'make bench-scaling NGPU="2" ARGS="--quick --modes lora"'
    return text


@pytest.mark.parametrize("text", EXECUTED)
def test_what_the_guides_say_to_type_works(place, text):
    if text == "ss -ltnp" and not shutil.which("ss"):
        pytest.skip("this machine has no ss")
    process = subprocess.Popen(
        ["bash", "-c", on_the_cpu(text, place.config)],
        cwd=place.folder, env=place.environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said[-3000:]
    if TRAINING.search(text):
        assert "done: trained for" in said


@pytest.mark.parametrize("text", LOOKED_AT)
def test_what_cannot_run_here_is_at_least_understood(place, text):
    assert subprocess.run(["bash", "-n", "-c", text], capture_output=True).returncode == 0
    words = [word for word in shlex.split(text) if not re.match(r"[A-Z_]+=", word)]
    if words[0] == "make":
        done = subprocess.run(
            ["bash", "-c", text.replace("make ", "make -n ", 1)], cwd=place.folder, env=place.environment, capture_output=True
        )
        assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_the_guides_are_read_as_they_are_meant():
    assert len(EXECUTED) > 15 and len(LOOKED_AT) >= 4
    assert "CUDA_VISIBLE_DEVICES=2,3 make train-distributed" in LOOKED_AT
    assert any(text.startswith("accelerate launch") and "train_distributed.py" in text for text in EXECUTED)
