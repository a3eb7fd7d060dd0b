"""Whatever the environment and accelerate's own flags say, a run is the one that was planned."""

import subprocess
import sys

import pytest

from sft_play.errors import ConfigError
from sft_play.launch.accelerate_config import CONFIGS
from sft_play.runlog import RunDir, read_metrics
from tests.conftest import REPOSITORY
from tests.fake_driver import write_driver
from tests.integration.cli import environment, finish, start

pytestmark = pytest.mark.integration

# In bf16, the first loss of these runs differs by a relative 1e-4.
CLOSE = 2e-6
CHANGES = {
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_DYNAMO_BACKEND": "inductor",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_TORCH_DEVICE": "meta",
    "FSDP_VERSION": "2",
    "RANK": "abc",
    "LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "2",
}


def losses(run: RunDir) -> list[float]:
    return [line["train/loss"] for line in read_metrics(run) if "train/loss" in line]


@pytest.mark.thorough
def test_the_environment_changes_nothing_of_a_run_and_the_banner_names_what_is_ignored(finished, tmp_path):
    words = ("--config", finished.config, "eval.generate=false", f"output.dir={tmp_path}")
    done = finish(start("train", *words, COLUMNS="200", **CHANGES))
    assert done.code == 0, done.err
    assert losses(RunDir(tmp_path / "one")) == losses(finished.run)
    assert "Mixed precision: no" in done.out
    assert "since config and plan decide" in done.out
    told = "".join(line for line in done.out.splitlines() if "Ignored: " in line)
    assert [name for name in CHANGES if name not in told] == []


@pytest.mark.slow
def test_flags_of_accelerate_change_nothing_of_a_run(finished, tmp_path):
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", CONFIGS / "ddp_cpu.yaml"),
        *("--num_processes", "2", "--mixed_precision", "bf16", "--dynamo_backend", "inductor"),
        *("--rdzv_backend", "loopback", "--main_process_port", "0"),
        *(REPOSITORY / "scripts" / "train_distributed.py", "--config", finished.config),
        *("parallel.engine=ddp", "eval.generate=false", f"output.dir={tmp_path}", "train.batch_size=4"),
    ]
    extra = environment(COLUMNS="200", CUDA_VISIBLE_DEVICES="")
    done = subprocess.run([str(word) for word in command], env=extra, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(RunDir(tmp_path / "one")) == pytest.approx(losses(finished.run), rel=CLOSE)
    assert "Mixed precision: no" in done.stdout
    assert "Ignored: ACCELERATE_DYNAMO_BACKEND, ACCELERATE_MIXED_PRECISION, since config" in done.stdout


def test_one_process_uses_the_freest_gpu_and_says_so_if_pytorch_cannot(finished, tmp_path):
    write_driver(tmp_path, 2, 20, 9)
    words = ("--config", finished.config, f"output.dir={tmp_path}")
    seen = dict(PYTHONPATH=f"{tmp_path}:{REPOSITORY}", CUDA_VISIBLE_DEVICES="0,1,2", COLUMNS="200")
    done = finish(start("train", *words, **seen))
    assert "on GPU 1 of 0, 1, 2, with the most free memory" in done.out
    assert (
        done.code == ConfigError.exit_code
        and "CUDA_VISIBLE_DEVICES to other GPUs, empty to use the CPU" in done.err
    )
    assert not (tmp_path / "one" / "plan.json").exists()
