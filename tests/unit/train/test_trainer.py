import pytest
import torch

from sft_play.errors import DoesNotFitError
from sft_play.train.out_of_memory import memory_errors_explained
from tests.unit.train.plans import PLAN


def test_running_out_of_memory_says_what_to_change():
    with (
        pytest.raises(
            DoesNotFitError, match=r"micro-batch 4: .*\n.*gradient_checkpointing=true or train.batch_size=1"
        ),
        memory_errors_explained(PLAN),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")
