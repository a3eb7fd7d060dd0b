"""The Dockerfile: what it runs works as commands, and docker builds it where there is docker."""

import re
import shlex
import shutil
import subprocess
import tomllib

import pytest

from tests.conftest import REPOSITORY

LINES = (REPOSITORY / "Dockerfile").read_text().splitlines()
STEPS = [tuple(line.split(" ", 1)) for line in LINES if line and not line.startswith("#")]
COMMANDS = [part.strip() for word, text in STEPS if word == "RUN" for part in text.split("&&")]


def test_the_base_has_an_exact_version():
    (base,) = (text for word, text in STEPS if word == "FROM")
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-cudnn-devel-ubuntu\d\d\.04", base)


def test_what_it_starts_is_installed():
    scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
    (entry,) = (text for word, text in STEPS if word == "ENTRYPOINT")
    assert entry == f'["{next(iter(scripts))}"]'


@pytest.mark.parametrize("command", COMMANDS)
def test_its_commands_are_understood(command):
    words = shlex.split(command)
    dry = ["bash", "-n", "-c", command]
    if words[0] == "make":
        dry = ["make", "-n", *words[1:], "VENV=/nowhere"]
    if words[:2] == ["apt-get", "install"]:
        if subprocess.run(["apt-cache", "show", "python3-venv"], capture_output=True).returncode:
            pytest.skip("the lists of apt are not here")
        dry = ["apt-get", "--simulate", *words[1:]]
    done = subprocess.run(dry, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_folders_of_a_checkout_that_it_needs_are_not_ignored():
    ignored = (REPOSITORY / ".dockerignore").read_text().split()
    assert not {"sft_play", "configs", "scripts", "locks", "requirements.lock", "Makefile"} & set(ignored)


@pytest.mark.slow
@pytest.mark.skipif(
    not shutil.which("docker") or subprocess.run(["docker", "info"], capture_output=True).returncode != 0,
    reason="needs docker",
)
def test_docker_builds_it():
    subprocess.run(["docker", "build", "--tag", "sft-play-test", "."], cwd=REPOSITORY, check=True)
    help = ["docker", "run", "--rm", "sft-play-test", "--help"]
    assert "Commands:" in subprocess.run(help, check=True, capture_output=True, text=True).stdout
