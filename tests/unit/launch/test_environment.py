"""Which variables of the environment reach the libraries, and which are named."""

import importlib.util
import logging
import os
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from sft_play.launch import environment
from sft_play.launch.environment import (
    IGNORED_VARIABLE,
    OF_A_RANK,
    OF_THE_LAUNCHER,
    SETTLED_ELSEWHERE,
    set_environment,
    settle_environment,
)
from sft_play.upstream.patching import undone

KEPT = {
    "ACCELERATE_DEBUG_MODE": "true",
    "ACCELERATE_CPU_AFFINITY": "1",
    "NCCL_DEBUG": "INFO",
    "OMP_NUM_THREADS": "2",
    "CUDA_VISIBLE_DEVICES": "0",
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ACCELERATE_MIXED_PRECISION", "bf16"),
        ("ACCELERATE_FP8_BACKEND", "TE"),
        ("NVIDIA_TF32_OVERRIDE", "1"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR"),
        ("ACCELERATE_USE_CPU", "true"),
        ("ACCELERATE_USE_DEEPSPEED", "true"),
        ("FSDP_VERSION", "2"),
        ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "7"),
        ("ACCELERATE_TORCH_DEVICE", "cpu"),
        ("DEEPSPEED_TIMEOUT", "1"),
        ("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1"),
        ("PET_MAX_RESTARTS", "3"),
        ("RANK", "abc"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("PMI_SIZE", "abc"),
        ("LOCAL_SIZE", "2"),
        ("ONEDNN_DEFAULT_FPMATH_MODE", "BF16"),
        ("DS_ACCELERATOR", "cuda"),
        ("WANDB_LOG_MODEL", "end"),
        ("HF_MLFLOW_LOG_ARTIFACTS", "1"),
    ],
)
def test_what_would_change_a_run_is_removed_and_named(name, value):
    values = KEPT | {name: value}
    settle_environment(values, rank=False)
    assert values == KEPT | {IGNORED_VARIABLE: name}


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
    assert values == {IGNORED_VARIABLE: ""}


@pytest.mark.parametrize(("cores", "ranks", "processes"), [(16, 8, 2), (16, 1, 16), (128, 2, 32), (4, 8, 1)])
def test_ranks_of_a_machine_share_the_processes_that_compile(monkeypatch, cores, ranks, processes):
    monkeypatch.setattr(environment, "usable_cores", lambda: cores)
    assert environment.compiling_processes({"LOCAL_WORLD_SIZE": str(ranks)}) == processes


READS = re.compile(
    r"""(?:environ(?:\.get|\.pop|\.setdefault)?\s*[\[(]|getenv\(|_from_env\(\s*\[?|is_env_variable_\w+\()"""
    r"""\s*["']([A-Z][A-Z0-9_]{2,})["']"""
)
# What the libraries read besides, and why a run is the same with it.
CHANGES_NOTHING = {
    "names the processes, and is checked": "WORLD_SIZE RANK LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT "
    "NODE_RANK NPROC TORCHELASTIC_RUN_ID ELASTIC_RUN_ID CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES",
    "for devices, clouds and packages that are not supported": "PT_HPU_* DEEPSPEED_USE_HPU PJRT_DEVICE TPU_NAME "
    "USE_TORCH_XLA XPU_* ASCEND_* HCCL_* NPU_* PYTORCH_CNDEV_* PYTORCH_ENABLE_MPS_* MORI_* DS_SDMA_* AWS_* SM_* "
    "SAGEMAKER_* SMDATAPARALLEL_* TRAINING_JOB_ARN ECS_* AZ_* AZUREML_* DLTS_* DLWS_* DATABRICKS_*",
    "selects kernels, or how they are built": "CUBLAS_WORKSPACE_CONFIG CUDA_LAUNCH_BLOCKING CUDA_HOME CUDA_PATH "
    "FLASH_ATTENTION_* TRANSFORMERS_SDPA_* TRANSFORMERS_DISABLE_DEEPGEMM_* USE_HUB_KERNELS OMP_NUM_THREADS "
    "KMP_AFFINITY NCCL_* CFLAGS CXX CPATH LDFLAGS LIBRARY_PATH CCL_ROOT CUTLASS_PATH DS_*CUDA* DS_NVCC_* "
    "DS_EVOFORMER_* PYTORCH_ROCM_ARCH PYTORCH_NVML_* TORCH_CUDA_ARCH_LIST TRITON_* USE_MKL_GEMM DS_PIN_MEMORY_*",
    "logs, checks, folders": "HF_HOME HF_MODULES_CACHE XDG_CACHE_HOME TENSORBOARD_LOGGING_DIR NETWORK_DEBUG_* "
    "TRANSFORMERS_VERBOSITY TRANSFORMERS_NO_* TRANSFORMERS_IS_CI TRANSFORMERS_DISABLE_TORCH_CHECK TQDM_DISABLE "
    "TORCH_DISTRIBUTED_DEBUG LOGGER_* DISABLE_LOGS_* VLLM_* TRL_* VSCODE_PID USER BRANCH TOKENIZERS_PARALLELISM "
    "HF_HUB_OFFLINE HF_DEACTIVATE_ASYNC_LOAD DISABLE_SAFETENSORS_CONVERSION JOB_ID",
    "trackers, as their own documentation says": "WANDB_* MLFLOW_* DISABLE_MLFLOW_* CLEARML_* COMET_* SWANLAB_* "
    "HF_DVCLIVE_* HF_DAGSHUB_* *KUBEFLOW_* RAY_SCOPE",
    "parts of the libraries that no run uses": "FOO VAR1 NDEV_PER_NODE FORK_LAUNCHED AUTOEP_* CROSS_* DS_DC_* DS_ENV_FILE "
    "SCHEDULER_DEBUG_ENV TRUST_REMOTE_CODE OPENREWARD_* DS_ALLOW_DEPRECATED_FP16",
}


@pytest.mark.parametrize("library", ["accelerate", "transformers", "trl", "peft", "deepspeed"])
def test_every_variable_that_a_library_reads_is_removed_or_changes_nothing(library):
    (folder,) = importlib.util.find_spec(library).submodule_search_locations
    sources = [path for path in Path(folder).rglob("*.py") if "test" not in str(path.relative_to(folder))]
    found = {name for path in sources for name in READS.findall(path.read_text(encoding="utf-8"))}
    assert found
    known = [*SETTLED_ELSEWHERE, *OF_THE_LAUNCHER, *OF_A_RANK, *environment.KEPT]
    known += " ".join(CHANGES_NOTHING.values()).split()
    assert [name for name in sorted(found) if not any(fnmatchcase(name, one) for one in known)] == []


def test_deepspeed_does_not_say_that_there_is_no_gpu():
    logger, said = logging.getLogger("DeepSpeed"), logging.getLogger("DeepSpeed").makeRecord
    texts = ("Setting accelerator to CPU. If you have GPU or other accelerator", "a real problem")
    records = [said("DeepSpeed", logging.WARNING, "file", 1, text, (), None) for text in texts]
    with undone():
        set_environment()
        assert [bool(logger.filter(record)) for record in records] == [False, True]
    assert logger.filter(records[0])


@pytest.mark.parametrize("library", ["datasets", "huggingface_hub"])
def test_libraries_report_nothing_unless_a_person_lets_them(library, monkeypatch):
    switch = {"datasets": "HF_UPDATE_DOWNLOAD_COUNTS", "huggingface_hub": "HF_HUB_DISABLE_TELEMETRY"}[library]
    (folder,) = importlib.util.find_spec(library).submodule_search_locations
    assert any(switch in path.read_text(encoding="utf-8") for path in Path(folder).glob("*.py"))
    monkeypatch.delenv(switch, raising=False)
    with undone():
        set_environment()
        off = os.environ[switch]
    assert off == {"datasets": "0", "huggingface_hub": "1"}[library]
