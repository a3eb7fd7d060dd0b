"""The task for SkyPilot: its commands are understood here, though nobody has rented a machine with it."""

import re
import subprocess

import pytest
import yaml

from tests.conftest import REPOSITORY

TASK = yaml.safe_load((REPOSITORY / "examples" / "skypilot.yaml").read_text())
PAGE = (REPOSITORY / "docs" / "guides" / "rented-gpu.md").read_text()
DRY = 'make() { command make -n VENV=/nowhere "$@"; }\napt-get() { echo "apt-get $*"; }\n'


def said(script: str, **environment: str) -> str:
    """What a part of the task would start."""
    done = subprocess.run(
        ["bash", "-euc", DRY + script],
        cwd=REPOSITORY,
        env={"PATH": "/usr/bin:/bin", **TASK["envs"], **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_installs_what_the_image_of_ours_has():
    dockerfile = (REPOSITORY / "Dockerfile").read_text()
    packages = re.search(r"--no-install-recommends (.*?) &&", dockerfile)[1]
    out = said(TASK["setup"])
    assert f"apt-get install --yes {packages}\n" in out and "pip_install.py torch==" in out
    image = re.fullmatch(
        r"docker:nvidia/cuda:(\d+)\.(\d+)\.\d+-cudnn-devel-ubuntu24\.04", TASK["resources"]["image_id"]
    )
    assert f"whl/cu{image[1]}{image[2]} make install" in TASK["setup"]


@pytest.mark.parametrize(
    ("machines", "words"),
    [
        ("1", "train --processes '0' --engine ddp --config 'configs/run_lora.yaml' '--args=train.epochs=2'"),
        ("2", "--nodes '2' --node-rank '1' --master-addr '10.0.0.1'"),
    ],
)
def test_it_trains_on_all_gpus_of_one_or_several_machines(machines, words):
    sky = {
        "SKYPILOT_NUM_NODES": machines,
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    }
    assert words in said(TASK["run"], ARGS="train.epochs=2", **sky)
    assert (REPOSITORY / TASK["envs"]["CONFIG"]).is_file()


def test_the_page_starts_this_task_and_says_that_it_was_not_run():
    (launch,) = re.findall(r"^sky launch .*$", PAGE, re.MULTILINE)
    name, file, env = re.fullmatch(r"sky launch --cluster (\w+) (\S+) --env (\w+)=\S+", launch).groups()
    assert (REPOSITORY / file).is_file() and env in TASK["envs"]
    assert f"rsync -av {name}:sky_workdir/runs" in PAGE and f"sky down {name}\n" in PAGE
    assert "not run" in PAGE and "not run by us" in (REPOSITORY / file).read_text()
    for command in re.findall(r"^make .*$", PAGE, re.MULTILINE):
        assert "sft_play" in said(command.partition(" #")[0]) or command == "make install"
