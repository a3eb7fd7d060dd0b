"""Which GPUs a command uses on a machine with several."""

import os
from dataclasses import replace

import pytest

from sft_play.errors import ConfigError
from sft_play.launch import visible_gpus
from sft_play.launch.visible_gpus import put_freest_gpu_first, use_freest_gpus
from sft_play.machine.gpus import Machine, detect_host, what_if
from sft_play.units import GIB


def gpus_with(*free_gib: float, note: str = "") -> Machine:
    first = what_if("L4").gpus[0]
    each = enumerate(free_gib)
    gpus = tuple(replace(first, index=at, uuid=f"GPU-{at}", free_bytes=int(free * GIB)) for at, free in each)
    return Machine(gpus=gpus, note=note, host=detect_host())


@pytest.mark.parametrize(
    ("asked", "note", "count", "chosen"),
    [
        (None, "", 2, "1,3"),
        (None, "", 3, "0,1,3"),  # of those with 2 GiB, the first
        ("4,GPU-b,6,MIG-c", "", 2, "GPU-b,MIG-c"),  # as somebody calls them
        (None, "7 MIG instances", 2, "GPU-1,GPU-3"),  # whose numbers are others
        (None, "", 4, None),
        (None, "", 0, None),
        (None, "", 1, None),  # this process has PyTorch, and CUDA may know already which there are
    ],
)
def test_processes_use_the_gpus_with_the_most_free_memory(monkeypatch, asked, note, count, chosen):
    monkeypatch.setattr(visible_gpus, "detect", lambda: gpus_with(2.4, 20, 2.9, 21, note=note))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", asked or "")
    said = use_freest_gpus(count)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == (chosen or asked or "")
    assert (said is None) == (chosen is None)
    assert not chosen or f"on GPU {chosen.replace(',', ', ')} of " in said


@pytest.mark.parametrize(
    ("asked", "free", "late", "order"),
    [
        (None, (2.4, 20, 21), False, "2,1,0"),
        ("4,GPU-b", (2.4, 20), False, "GPU-b,4"),
        ("4,5", (20.1, 20.9), False, "4,5"),  # as many GiB
        ("4,5", (2, 20), True, "4,5"),
    ],
)
def test_a_model_that_generates_goes_to_the_gpu_with_the_most_free_memory(
    monkeypatch, asked, free, late, order
):
    monkeypatch.setattr(visible_gpus, "detect", lambda: gpus_with(*free))
    monkeypatch.setattr(visible_gpus, "_too_late", lambda: late)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", asked or "")
    put_freest_gpu_first()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == order


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(visible_gpus, "detect", lambda: gpus_with(8, 8))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with pytest.raises(ConfigError, match="has 2 GPUs that CUDA_VISIBLE_DEVICES=2,3 shows, and each process"):
        use_freest_gpus(3)
    monkeypatch.setattr(visible_gpus, "detect", lambda: gpus_with())
    assert use_freest_gpus(3) is None  # on a CPU
