"""The guides cannot rot: their commands are run here, on the CPU, with a tiny config in place of theirs.

Each kind of launch is run once, in the first form that it comes in. Only looked at (bash -n; make -n and our
own parser of what it would start): forms with other settings, what the tests in ELSEWHERE run, lines that say
"needs GPUs" or "needs answers", and multi-node sections, which have tests of their own
(tests/cluster).
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

from sft_play import cli
from sft_play.config.load import load_config
from tests.conftest import REPOSITORY
from tests.integration.cli import make_workspace

pytestmark = pytest.mark.integration

GUIDES = (
    "MULTI_GPU_GUIDE.md",
    "ACCELERATE_SETUP.md",
    "docs/guides/offload.md",
    "docs/guides/long-rows.md",
)
MARKS = ("needs GPUs", "needs answers")
OTHER_LANGUAGES = ("text", "yaml")
CLUSTER = re.compile(r"multi-node|slurm", re.IGNORECASE)
# Several launches of two processes, each of which costs 20 s of CPU time, are made by other tests already
ELSEWHERE = {
    r"make train( ARGS=.*)?$": "integration/test_demo.py",
    r"make train-deepspeed": "integration/test_distributed.py::test_two_processes_learn_what_one_does",
    r"make train-fsdp": "integration/test_distributed.py::test_two_processes_learn_what_one_does",
    r"torchrun ": "integration/test_distributed.py::test_torchrun_needs_no_launcher_of_ours",
    r"bash scripts/train_multi_gpu.sh": "unit/test_makefile.py::test_the_shell_script_is_the_make_target",
}
RARELY = (
    "make bench-",
    "make plan",
    "python scripts/train_distributed.py",
    "accelerate launch",
)  # by make test-faults
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


def kind(text: str) -> str:
    """What a command starts, without its settings."""
    words = [
        word
        for word in shlex.split(text.replace(".venv/bin/", ""))
        if "=" not in word and not word.startswith("-")
    ]
    return " ".join(words[:2] if words[0] in ("make", "accelerate") else words)


def sort_out() -> tuple[list[str], list[str]]:
    """The commands to run and those to look at, each once."""
    run: dict[str, str] = {}
    look: dict[str, None] = {}
    for command in (command for guide in GUIDES for command in commands_of(guide)):
        here = command.runs and not any(re.match(pattern, command.text) for pattern in ELSEWHERE)
        if not here or run.setdefault(kind(command.text), command.text) != command.text:
            look[command.text] = None
    return list(run.values()), list(look)


EXECUTED, LOOKED_AT = sort_out()


class Place(NamedTuple):
    """Where the guides' commands run: links to what they name, a home folder, an installed environment."""

    folder: Path
    config: Path
    environment: dict[str, str]


@pytest.fixture(scope="module")
def place(tiny_model, make_cache, tmp_path_factory) -> Place:
    folder = tmp_path_factory.mktemp("guides")
    for name in (
        "Makefile",
        "configs",
        "locks",
        "scripts",
        "requirements.lock",
        "requirements-source.lock",
        "pyproject.toml",
        "sft_play",
        "benchmarks",
    ):
        (folder / name).symlink_to(REPOSITORY / name)
    venv = folder / ".venv"
    venv.mkdir()
    for name in ("bin", "lib", "include", "pyvenv.cfg"):
        (venv / name).symlink_to(Path(sys.prefix) / name)
    (venv / ".ready").touch()  # nothing is installed
    (folder / "home").mkdir()
    config = make_workspace(folder / "work", tiny_model)
    text = config.read_text().replace("max_steps: 8", "max_steps: 2\n  probe: false")
    config.write_text(text.replace("  max_new_tokens: 6", "  generate: false"))
    settings = set(
        re.findall(r"\$\((?:if )?([A-Z]+)\)", (REPOSITORY / "Makefile").read_text())
    )  # those of `make test` itself
    dropped = settings | {"MAKEFLAGS", "MAKELEVEL", "HF_HOME", "XDG_CACHE_HOME"}
    inherited = {name: os.environ[name] for name in os.environ.keys() - dropped}
    environment = {
        **inherited,
        "HOME": str(folder / "home"),
        "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "CONFIG": str(config),
        "SFT_PLAY_CACHE": str(make_cache(folder / "cache")),
        "PYTHONPATH": str(folder),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return Place(folder, config, environment)


def on_the_cpu(text: str, config: Path) -> str:
    """The command as it can run here: our config for theirs, CPU files for those of GPUs."""
    text = re.sub(r"configs/(run_\w+|demo)\.yaml", str(config), text)
    text = re.sub(r"configs/accelerate/(ddp|zero2)\.yaml", r"configs/accelerate/\1_cpu.yaml", text)
    if text.startswith("make bench-scaling"):
        text = 'make bench-scaling NGPU="1" ARGS="--quick --modes lora"'
    return text


@pytest.mark.thorough
@pytest.mark.parametrize(
    "text",
    [pytest.param(text, marks=pytest.mark.slow) if text.startswith(RARELY) else text for text in EXECUTED],
)
def test_what_the_guides_say_to_type_works(place, text):
    if text == "ss -ltnp" and not shutil.which("ss"):
        pytest.skip("this machine has no ss")
    process = subprocess.Popen(
        ["bash", "-c", on_the_cpu(text, place.config)],
        cwd=place.folder, env=place.environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=300)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said[-3000:]
    if TRAINING.search(text):
        assert "done: trained for" in said


@pytest.mark.parametrize("text", LOOKED_AT)
def test_what_cannot_run_here_is_at_least_understood(place, text):
    assert subprocess.run(["bash", "-n", "-c", text], capture_output=True).returncode == 0
    if "make " not in text:
        return
    dry = ["bash", "-c", re.sub(r"\bmake ", "make -n ", text, count=1)]
    done = subprocess.run(dry, cwd=place.folder, env=place.environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    for line in done.stdout.splitlines():
        if "-m sft_play" in line:
            words = shlex.split(line.split("-m sft_play", 1)[1])
            arguments = cli.parse(words)
            assert arguments.command == words[0]
            load_config(place.config, getattr(arguments, "overrides", []))


def test_the_guides_are_read_as_they_are_meant():
    assert len(EXECUTED) >= 10 and len(LOOKED_AT) >= 10
    assert "CUDA_VISIBLE_DEVICES=2,3 make train-distributed" in LOOKED_AT
    for start in (
        "make train-distributed",
        "make resume",
        "accelerate launch",
        "python scripts/train_distributed.py",
    ):
        assert sum(text.startswith(start) for text in EXECUTED) == 1, start


@pytest.mark.parametrize("test", ELSEWHERE.values())
def test_what_runs_elsewhere_is_there(test):
    name, _, function = test.partition("::")
    assert function in (REPOSITORY / "tests" / name).read_text()
