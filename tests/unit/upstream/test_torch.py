"""What is changed in PyTorch for a while."""

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param

from sft_play.upstream.torch import dividing_integers


def test_integers_ask_for_no_gradients_where_they_are_divided():
    with dividing_integers():
        assert not _fsdp_param.nn.Parameter(torch.zeros(2, dtype=torch.uint8)).requires_grad
        assert _fsdp_param.nn.Parameter(torch.zeros(2)).requires_grad
    assert _fsdp_param.nn is torch.nn
