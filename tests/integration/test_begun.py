"""Runs that an earlier version began go on, and end with the weights that the earlier version itself reaches.

`tests/begun/1dbe8e5.tar.xz` holds what that commit left of three runs after two of their four optimizer steps
(checkpoint, plan, resolved config, digests of rows and base, metrics), the model and rows they began with,
and under `reached/` the weights with which the same commit, uninterrupted, ended them. It ran with ARITHMETIC, since
other instructions round otherwise. The scripts that DeepSpeed copies into a checkpoint were taken out, of its
manifest too.
"""

import shutil
import tarfile
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.conftest import REPOSITORY
from tests.integration.cli import finish, start

BEGUN = REPOSITORY / "tests" / "begun" / "1dbe8e5.tar.xz"
ARITHMETIC = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "AVX2"}


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("begun")
    with tarfile.open(BEGUN) as archive:
        archive.extractall(folder, filter="data")
    yield folder
    shutil.rmtree(folder)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name, processes, weights",
    [
        ("lora", 1, "adapter/adapter_model.safetensors"),
        ("deepspeed_z2", 2, "model/model.safetensors"),
        ("fsdp2", 2, "model/model.safetensors"),
    ],
)
def test_a_run_of_an_earlier_version_goes_on_to_the_weights_that_it_would_have_reached(
    begun, monkeypatch, name, processes, weights
):
    monkeypatch.chdir(begun)  # their paths are relative
    config = f"runs/{name}/config.resolved.yaml"
    words = "train", "--config", config, "--processes", str(processes), "train.resume=auto"
    done = finish(start(*words, **ARITHMETIC), 300)
    assert done.code == 0, done.err[-3000:]
    assert f"resuming from runs/{name}/checkpoints/checkpoint-2" in done.out
    found, expected = load_file(f"runs/{name}/{weights}"), load_file(f"reached/{name}.safetensors")
    assert found.keys() == expected.keys()
    assert [key for key in found if not found[key].equal(expected[key])] == []
