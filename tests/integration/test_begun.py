"""Runs that an earlier version began go on, and end with the weights that the earlier version itself reaches.

`tests/begun/1dbe8e5.tar.xz` holds what that commit left of three runs after two of their four optimizer steps
(checkpoint, plan, resolved config, digests of rows and base, metrics), the model and rows they began with,
and under `reached/` the weights with which the same commit, uninterrupted, ended them. It ran with ARITHMETIC, since
other instructions round otherwise. The scripts that DeepSpeed copies into a checkpoint were taken out, of its
manifest too.
"""

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from safetensors.torch import load_file

from sft_play.runlog import RunDir
from tests.conftest import REPOSITORY
from tests.integration.cli import environment

BEGUN = REPOSITORY / "tests" / "begun" / "1dbe8e5.tar.xz"
ARITHMETIC = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "AVX2"}


RUNS = {"lora": 1, "deepspeed_z2": 2, "fsdp2": 2}  # processes
# All of it in forks of a process that began with this arithmetic, and that imports once what each of them needs.
GOES_ON = """
from functools import partial
from pathlib import Path
import tests.integration.worker
from tests.stress.forked import exit_codes, ranks_of, run_command
for name, processes in {runs}.items():
    folder = Path(name)
    folder.mkdir()
    words = ["--config", f"runs/{{name}}/config.resolved.yaml", "train.resume=auto"]
    alone = partial(run_command, ["train", "--processes", "1", *words], folder)
    codes = exit_codes(ranks_of(words, folder, processes) if processes > 1 else [alone])
    (folder / "codes").write_text(str(codes))
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> Path:
    """The folder in which they have gone on."""
    folder = tmp_path_factory.mktemp("begun")
    with tarfile.open(BEGUN) as archive:
        # Python 3.11.2 knows no filters
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    script = [sys.executable, "-c", GOES_ON.format(runs=RUNS)]  # their paths are relative
    subprocess.run(script, cwd=folder, env=environment(**ARITHMETIC), check=True)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.thorough
@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_an_earlier_version_goes_on_to_the_weights_that_it_would_have_reached(ended, name):
    said = "".join(path.read_text() for path in sorted((ended / name).glob("output*.txt")))
    assert (ended / name / "codes").read_text() == str([0] * RUNS[name]), said[-3000:]
    assert f"resuming from runs/{name}/checkpoints/checkpoint-2" in said
    run = RunDir(ended / "runs" / name)
    weights = next(path for path in (run.adapter, run.model) if path.exists())
    found, expected = (
        load_file(path) for path in (*weights.glob("*.safetensors"), ended / f"reached/{name}.safetensors")
    )
    assert found.keys() == expected.keys()
    assert [key for key in found if not found[key].equal(expected[key])] == []
