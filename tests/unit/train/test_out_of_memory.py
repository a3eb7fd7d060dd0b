"""Which errors say that memory ran out."""

import pytest
import torch

from sft_play.train.out_of_memory import is_out_of_memory


def test_the_error_of_the_allocator_of_the_cpu_is_recognized():
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**60, dtype=torch.uint8)  # more than an address space holds
    assert is_out_of_memory(error.value)
    assert is_out_of_memory(MemoryError()) and not is_out_of_memory(RuntimeError("shapes do not match"))
