"""Which variables of the environment reach the libraries, and which are named."""

import pytest

from sft_play.launch.environment import IGNORED_VARIABLE, ignored_lines, settle_environment

KEPT = {
    "ACCELERATE_DEBUG_MODE": "true",
    "ACCELERATE_CPU_AFFINITY": "1",
    "NCCL_DEBUG": "INFO",
    "OMP_NUM_THREADS": "2",
    "CUDA_VISIBLE_DEVICES": "0",
}


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("ACCELERATE_MIXED_PRECISION", "bf16", "train.mixed_precision decides"),
        ("ACCELERATE_FP8_BACKEND", "TE", "train.mixed_precision decides"),
        ("NVIDIA_TF32_OVERRIDE", "1", "train.mixed_precision decides"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "not compiled"),
        ("ACCELERATE_USE_CPU", "true", "CUDA_VISIBLE_DEVICES decides"),
        ("ACCELERATE_USE_DEEPSPEED", "true", "parallel.engine decides"),
        ("FSDP_VERSION", "2", "parallel.engine decides"),
        ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3", "configs/deepspeed_z2.json decides"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "7", "the plan decides"),
        ("ACCELERATE_TORCH_DEVICE", "cpu", "the plan decides"),
        ("DEEPSPEED_TIMEOUT", "1", "parallel.timeout_s decides"),
        ("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1", "without running code"),
        ("PET_MAX_RESTARTS", "3", "our launcher decides"),
        ("RANK", "abc", "WORLD_SIZE is not set"),
    ],
)
def test_what_would_change_a_run_is_removed_and_named(name, value, reason):
    values = KEPT | {name: value}
    settle_environment(values, rank=False)
    assert values == KEPT | {IGNORED_VARIABLE: name}
    (line,) = ignored_lines([name])
    assert line.startswith(f"Ignored: {name}, since ") and reason in line


def test_ranks_learn_of_deepspeed_and_of_what_their_launcher_ignored():
    values = {
        "WORLD_SIZE": "2",
        "RANK": "1",
        "PET_SIGNALS_TO_HANDLE": "SIGTERM",
        "ACCELERATE_USE_DEEPSPEED": "true",
    }
    of_accelerate = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_CONFIG_DS_FIELDS": "zero_stage"}
    both = (
        values | of_accelerate | {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR", IGNORED_VARIABLE: "FSDP_VERSION"}
    )
    settle_environment(both, rank=True)
    assert both == values | {IGNORED_VARIABLE: "ACCELERATE_DYNAMO_BACKEND,FSDP_VERSION"}


def test_what_changes_nothing_is_not_spoken_of():
    values = {"ACCELERATE_MIXED_PRECISION": "no", "LOCAL_RANK": "0", "ACCELERATE_USE_FSDP": "False"}
    settle_environment(values, rank=False)
    assert values == {IGNORED_VARIABLE: ""} and ignored_lines([]) == []
