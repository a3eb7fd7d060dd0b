"""Whole runs through the command line: each mode and precision, and memory as predicted."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_cases import measured_cases, predict, spec_from_json
from benchmarks.sizing_gpu import local_target, run_case, with_errors
from benchmarks.steps import step_with
from sft_play.machine.gpus import detect
from sft_play.runlog import RunDir, read_json
from sft_play.units import MIB
from tests.integration.cli import finish, make_workspace, start

# Of the peak of a measured step: on a GPU, the rounding of the allocator weighs most in small models.
ERROR = {"cpu": 1e-3, "cuda": 0.03}


@pytest.fixture
def config(tiny_model, tmp_path):
    return make_workspace(tmp_path, tiny_model)


def settings(device, **more) -> dict[str, str]:
    """The environment of a command on this device."""
    return {
        **({"CUDA_VISIBLE_DEVICES": ""} if device.type == "cpu" else {"CUDA_VISIBLE_DEVICES": "0"}),
        **more,
    }


def summary_of(config: Path) -> dict:
    return read_json(RunDir(config.parent / "runs" / "one").summary)


def trained(device, config, mode) -> dict:
    """The summary of a run of this mode."""
    done = finish(
        start("train", "--config", config, f"tuning.mode={mode}", **settings(device)), timeout_s=300
    )
    assert done.code == 0, done.err
    return summary_of(config)


def assert_trained_as_predicted(device, found):
    assert found["device"] == device.type and found["status"] == "done" and found["skipped_steps"] == 0
    # the supervised share is rounded up, which shows in a model as small as this one
    assert found["measured_peak_bytes"] == pytest.approx(found["predicted_peak_bytes"], rel=0.03)


@pytest.mark.thorough
def test_a_run_has_the_memory_that_was_predicted(device, config, request):
    """On a CPU, the run of this config that other tests read, too."""
    on_cpu = device.type == "cpu"
    known = summary_of(request.getfixturevalue("finished").config) if on_cpu else None
    assert_trained_as_predicted(device, known or trained(device, config, "lora"))


@pytest.mark.parametrize("mode", ["qlora", "full"])
def test_the_other_modes_do_too_on_a_gpu(only_gpu, config, mode):
    assert_trained_as_predicted(only_gpu, trained(only_gpu, config, mode))


@pytest.mark.parametrize("precision", ["bf16", "fp16", "no"])
def test_each_precision_trains_on_a_gpu(only_gpu, config, precision):
    if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this GPU has no bf16")
    words = (f"train.mixed_precision={precision}", "train.max_steps=12")
    done = finish(start("train", "--config", config, *words, **settings(only_gpu)), timeout_s=300)
    assert done.code == 0, done.err
    found = summary_of(config)
    assert found["eval"]["after"]["loss"] < found["eval"]["before"]["loss"]


def test_eight_bit_states_train_on_a_gpu(only_gpu, config):
    words = ("train.optimizer=adamw_8bit", "tuning.mode=full")
    done = finish(start("train", "--config", config, *words, **settings(only_gpu)), timeout_s=300)
    assert done.code == 0, done.err


def test_a_merged_model_answers_as_its_adapter_does_on_a_gpu(only_gpu, config):
    for command in ("train", "merge", "merge-test"):
        done = finish(start(command, "--config", config, **settings(only_gpu)), timeout_s=300)
        assert done.code == 0, done.err


@pytest.mark.thorough
@pytest.mark.parametrize("place", range(4))
def test_a_measured_step_has_the_predicted_peaks(device, place):
    target = local_target(device)
    case = measured_cases(target, quick=True)[place]
    line = run_case(case, device)
    assert line["measured"]["problem"] is None
    row = with_errors(line, predict(line["model"], spec_from_json(line["spec"]), target))
    assert abs(row["error"]) < ERROR[device.type]


def test_a_step_with_inputs_of_layers_in_ram_has_the_predicted_peaks_on_a_gpu(only_gpu):
    target = local_target(only_gpu)
    case = next(c for c in measured_cases(target, quick=True) if c.spec.activations.policy == "recompute")
    spec = step_with(case.spec, activations="offload")
    line = run_case(replace(case, spec=spec), only_gpu)
    assert line["measured"]["problem"] is None
    row = with_errors(line, predict(line["model"], spec_from_json(line["spec"]), target))
    assert abs(row["error"]) < ERROR["cuda"]


def test_the_driver_counts_what_this_process_holds(only_gpu):
    torch.zeros(1, device=only_gpu)
    before = detect().gpus[0].own_bytes
    held = torch.empty(512 * MIB, dtype=torch.uint8, device=only_gpu)
    after = detect().gpus[0].own_bytes
    if before is None or after is None:
        pytest.skip("the driver does not report memory by process here")
    assert after - before == pytest.approx(512 * MIB, abs=32 * MIB)
    del held


@pytest.mark.parametrize("expandable", ["True", "False"])
def test_reserved_memory_with_and_without_expandable_segments(only_gpu, config, expandable):
    allocator = {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}"}
    done = finish(start("train", "--config", config, **settings(only_gpu, **allocator)), timeout_s=300)
    assert done.code == 0, done.err
    probe = summary_of(config)["probe"]
    assert probe["reserved_bytes"] >= max(probe["phases"].values())
