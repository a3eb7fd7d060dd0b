"""Which builds of PyTorch can use which GPUs; the codes are those of its support matrix (pytorch #172352)."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from sft_play.errors import ConfigError
from sft_play.machine.cuda import Build, problem_of, require_usable, why_left_out
from sft_play.machine.gpus import what_if

CUDA13 = Build("2.13.0", "13.0", True, "", ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"))
CUDA12 = Build("2.13.0", "12.6", True, "", ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"))
LATER = CUDA12._replace(codes=(*CUDA12.codes, "compute_90"))
ONLY_HOPPER = CUDA12._replace(codes=("sm_90a",))


def machine(name, cuda="13.0", driver="580.65.06"):
    return replace(what_if(name), what_if=False, driver=driver, cuda=cuda)


@pytest.mark.parametrize(
    ("build", "runs", "does_not"),
    [
        (CUDA13, ["T4", "A100 80GB", "RTX 3060", "RTX 4090", "H200", "B200", "RTX 5090"], ["V100 32GB"]),
        (CUDA12, ["V100 32GB", "T4", "RTX 4090", "H100 80GB"], ["B200", "RTX 5090"]),
        (LATER, ["V100 32GB", "RTX 5090", "B200"], []),  # what can be compiled for any later GPU
        (ONLY_HOPPER, ["H100 80GB"], ["RTX 4090", "B200"]),
    ],
)
def test_a_build_runs_on_gpus_that_it_has_code_for(build, runs, does_not):
    assert [problem_of(machine(name), build) for name in runs] == [None] * len(runs)
    for name in does_not:
        problem, fix = problem_of(machine(name), build)
        assert machine(name).gpus[0].name in problem and "has no code for" in problem
        assert "install.md#cuda" in fix


def test_what_the_kernels_of_a_run_are_compiled_with_is_asked_for_before_the_run():
    problem, fix = problem_of(
        machine("RTX 4090"), CUDA13._replace(lacks="a C compiler (gcc; CC names another one)")
    )
    assert problem.startswith("training on a GPU needs a C compiler (gcc") and problem.endswith(
        "not installed"
    )
    assert "apt-get install gcc python3-dev" in fix


def test_a_driver_that_is_too_old_is_named_with_what_it_supports():
    build = CUDA13._replace(finds_gpus=False, says="The NVIDIA driver on your system is too old", codes=())
    problem, fix = problem_of(machine("RTX 4090", cuda="12.4", driver="550.54.14"), build)
    assert problem == "torch 2.13.0 is built for CUDA 13.0, but driver 550.54.14 supports CUDA up to 12.4"
    assert fix.startswith("install PyTorch for CUDA 12.6: docs/")
    _, fix = problem_of(machine("RTX 5090", cuda="12.8", driver="570.124.06"), build)
    assert fix == "update the driver to 580 or newer, which PyTorch needs for NVIDIA GeForce RTX 5090"
    problem, fix = problem_of(machine("RTX 4090"), build)  # whose driver is new enough: PyTorch says why
    assert fix.startswith("see what `nvidia-smi` says")
    assert problem.endswith("finds no GPU that it can use: The NVIDIA driver on your system is too old")


def test_a_run_on_a_gpu_that_pytorch_cannot_use_is_refused_before_it_begins():
    ancient = replace(machine("L4").gpus[0], compute_capability=(3, 0))  # which no build has code for
    here = replace(machine("L4"), gpus=(ancient,))
    with pytest.raises(ConfigError, match=r"^torch .*GPU.*CUDA_VISIBLE_DEVICES to other GPUs, empty to use"):
        require_usable(here)
    require_usable(replace(here, what_if=True))  # nobody runs on it
    require_usable(replace(here, gpus=()))


@pytest.mark.parametrize(
    ("asked", "fits"), [("7", False), ("GPU-12ab", False), ("", True), ("-1", True), ("NoDevFiles", True)]
)
def test_a_gpu_that_is_asked_for_and_is_not_there_is_no_run_on_the_cpu(monkeypatch, asked, fits):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", asked)
    note = f"CUDA_VISIBLE_DEVICES={asked} shows 0 of 4 GPUs"
    here = replace(machine("L4"), gpus=(), note=note)
    with nullcontext() if fits else pytest.raises(ConfigError, match=f"^{note}; `make gpu-info`"):
        require_usable(here)


@pytest.mark.parametrize(
    ("vendor", "kind", "hidden", "said"),
    [
        ("0x10de", "0x030200", None, "an NVIDIA GPU, which is not used: no driver"),
        ("0x10de", "0x030200", "", None),  # somebody wants the CPU
        ("0x10de", "0x020000", None, None),  # a network adapter
        ("0x1002", "0x030000", None, None),
    ],
)
def test_a_gpu_whose_driver_does_not_work_is_not_left_out_in_silence(
    monkeypatch, tmp_path, vendor, kind, hidden, said
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    device = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")
    here = replace(machine("L4"), gpus=(), note="no driver")
    found = why_left_out(here, tmp_path)
    assert found is None if said is None else said in found
    assert why_left_out(machine("L4"), tmp_path) is None  # it is used
