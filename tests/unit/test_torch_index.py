"""Which build of PyTorch is installed for which driver and GPUs."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from scripts.torch_index import answer
from sft_play.machine.cuda import PUBLISHED
from sft_play.machine.gpus import what_if
from tests.conftest import REPOSITORY
from tests.fake_driver import write_driver

CUDA_12 = ["--extra-index-url", "https://download.pytorch.org/whl/cu126"]


def machine(driver, *names):
    gpus = tuple(what_if(name).gpus[0] for name in names)
    return replace(what_if("L4"), what_if=False, driver=driver, gpus=gpus)


@pytest.mark.parametrize(
    ("driver", "names", "arguments", "said"),
    [
        ("580.65.06", ["RTX 4090"], [], ""),
        ("595.10", ["T4", "B200", "RTX 5090"], [], ""),
        ("570.124.06", ["RTX 4090"], CUDA_12, "the build for CUDA 12.6, for driver 570.124.06 and NVIDIA GeForce RTX 4090"),
        ("535.104.05", ["H100 80GB"], CUDA_12, "CUDA 12.6"),
        ("580.65.06", ["V100 32GB", "T4"], CUDA_12, "CUDA 12.6"),
        ("570.124.06", ["RTX 5090"], [], "update the driver to 580 or newer, which PyTorch needs for"),
        ("470.82", ["RTX 3060"], [], "update the driver to 525 or newer"),
        ("580.65.06", ["V100 32GB", "RTX 5090"], [], "no published build of PyTorch has code for all of"),
        ("550.54.14", [], [], ""),  # hidden, or of another machine
        (None, ["RTX 3060"], [], ""),
    ],
)  # fmt: skip
def test_pip_is_led_to_a_build_for_this_driver_and_these_gpus(driver, names, arguments, said):
    found, says = answer(machine(driver, *names), has_index=False)
    assert found == arguments
    assert said in says and bool(said) == bool(says)


def test_who_has_an_index_of_their_own_is_told_what_it_must_have():
    here = machine("550.54.14", "RTX 3060")
    arguments, says = answer(here, has_index=True)
    assert arguments == [] and "it must have the build for CUDA 12.6" in says


@pytest.mark.parametrize("own", ["", "https://localhost/simple"])
def test_the_driver_is_asked_and_so_are_the_settings_of_pip(tmp_path, own):
    write_driver(tmp_path, 20)
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "CUDA_", "XDG_"))
    }
    asked = {"PYTHONPATH": str(tmp_path), "PIP_CONFIG_FILE": os.devnull} | (
        {"PIP_INDEX_URL": own} if own else {}
    )
    command = [sys.executable, "-m", "scripts.torch_index"]
    done = subprocess.run(command, cwd=REPOSITORY, env=kept | asked, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.split() == ([] if own else CUDA_12), done.stderr
    assert "CUDA 12.6, for driver 550.54.14 and NVIDIA L4" in done.stderr


def test_the_page_names_the_oldest_drivers():
    page = (REPOSITORY / "docs" / "guides" / "install.md").read_text()
    for wheels in PUBLISHED:
        major = wheels.version if wheels.version.startswith("12") else "13.x"
        assert f"| CUDA {major} | {wheels.driver} |" in page
