import gc
import threading

import pytest
import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from benchmarks.random_models import random_model
from benchmarks.small_models import WIDE, small_config
from sft_play.config.schema import TuningConfig
from sft_play.engines.on_disk import put_on_disk
from sft_play.engines.shards import shard
from sft_play.model.architecture.shape import units_of
from sft_play.sizing.meters.cpu import alive_bytes, storage_bytes
from sft_play.sizing.meters.phases import PhaseMeter
from sft_play.sizing.step import StepSpec


@pytest.mark.thorough
def test_each_phase_has_the_peak_of_its_own_time():
    model = torch.nn.Linear(100, 10)
    before = storage_bytes(model)
    assert before == 4 * 1010
    with PhaseMeter(torch.device("cpu"), model) as meter:
        meter.begin("forward")
        kept = torch.empty(1_000_000)
        meter.anchor()
        for _ in range(2):
            meter.begin("backward")
            passing = torch.empty(500_000)
            del passing
            meter.begin("forward")
        del kept
    assert meter.peaks == {"forward": before + 4_000_000, "backward": before + 6_000_000}
    assert (meter.reserved_bytes, meter.retries) == (None, 0)


def test_tensors_that_the_compiler_describes_others_by_have_no_memory():
    """It may keep some after it has compiled: a run on two CPU processes with train.compile=true ended so."""
    gc.collect()  # what earlier tests of this process left must not go between the two looks
    model, real = torch.nn.Linear(100, 10), torch.empty(1000)
    before = alive_bytes(model)
    described = torch._to_functional_tensor(real)
    with pytest.raises(RuntimeError, match="invalid python storage"):
        described.untyped_storage().data_ptr()
    assert alive_bytes(model) == before


@pytest.mark.thorough
def test_what_other_threads_allocate_and_free_counts():
    """As gloo's do; what was there before and is freed meanwhile is in the peak that came before."""
    other = torch.empty(10_000)  # not counted: it is there before the meter
    model, held = torch.nn.Linear(10, 10), []
    before, made = storage_bytes(model), PhaseMeter(torch.device("cpu"), model)
    held.append(torch.empty(250_000))
    with made as meter:
        meter.begin("forward")
        in_thread(lambda: held.append(torch.empty(1_000_000)))
        torch.empty(1)  # an event of this thread
        meter.anchor()
        meter.begin("backward")
        in_thread(held.clear)
        torch.empty(1)
    del other
    assert meter.peaks["forward"] == before + 5_000_000 + 4
    assert meter.peaks["backward"] == before + 1_000_000 + 4  # a block from before: nobody sees it freed


def in_thread(do) -> None:
    thread = threading.Thread(target=do)
    thread.start()
    thread.join()


def test_without_a_look_at_what_is_alive_there_is_no_measurement():
    with PhaseMeter(torch.device("cpu"), torch.nn.Linear(10, 10)) as meter:
        meter.begin("forward")
        torch.empty(1_000_000)
    assert meter.peaks is None


def test_what_is_in_a_file_takes_no_memory(tmp_path):
    model = torch.nn.Linear(100, 10)
    model.weight.data = put_on_disk(torch.empty_like(model.weight), tmp_path).detach()
    assert storage_bytes(model) == 4 * 10


def test_tables_of_4_bit_weights_count_where_the_model_is_divided():
    config = small_config("llama", WIDE)
    model = random_model(config, StepSpec(mode="qlora"), TuningConfig(mode="qlora"), torch.device("cpu"))
    whole = storage_bytes(model)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        shard(units_of(model), "cpu")
    finally:
        distributed.destroy_process_group()
    assert all(isinstance(weight, DTensor) for weight in model.parameters())
    assert storage_bytes(model) == whole
