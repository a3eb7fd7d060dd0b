"""Divided models on GPUs: which cases there are, and that their processes run, tried out on the CPU."""

import pytest
import torch

from benchmarks.sharded_gpu import launched, sharded_cases

CPU = torch.device("cpu")


@pytest.mark.parametrize("gpus", [1, 4])
def test_all_gpus_divide_the_model_and_one_alone_keeps_it_in_ram(gpus):
    cases = sharded_cases(CPU, gpus, quick=True)
    assert len({case.key for case in cases}) == len(cases)
    assert {case.spec.mode for case in cases} == {"full", "lora", "qlora"}
    divided = {case.spec.sharing.shards for case in cases if not case.spec.sharing.offloads}
    in_ram = {case.spec.sharing.shards for case in cases if case.spec.sharing.offloads}
    assert sum(not case.spec.sharing.reshard_after_forward for case in cases) == (gpus > 1)
    assert (divided, in_ram) == (({4}, set()) if gpus == 4 else ({2}, {1}))


@pytest.mark.slow
def test_a_case_runs_in_processes_of_its_own_and_a_failure_is_its_result():
    case = sharded_cases(CPU, 2, quick=True)[1]
    found = launched(case, CPU)
    assert found["problem"] is None and found["step_seconds"] > 0
    broken = launched(type(case)("broken", "small-none", case.spec), CPU)
    assert "Error" in broken["problem"] and not broken["phases"]
