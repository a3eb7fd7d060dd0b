"""Where a resumed run puts AdamW's states. The meta device stands for a GPU: its tensors are as far from the CPU's."""

from types import SimpleNamespace

import pytest
import torch
from torch import distributed
from torch.distributed.tensor import DTensor, Shard

from sft_play.engines import shards, zero3_parts


def state_of(name: str) -> dict[str, torch.Tensor]:
    """As read from a checkpoint, on the CPU."""
    return {
        "step": torch.tensor(3.0),
        **{key: torch.ones(4, 2) for key in ("weight", "exp_avg", "exp_avg_sq")},
    }


@pytest.fixture
def group_of_one():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_fsdp2_has_the_step_beside_the_weights_where_the_fused_update_reads_it(group_of_one):
    weights = torch.empty(4, 2, device="meta")
    weight = torch.nn.Parameter(DTensor.from_local(weights, shards.process_mesh("cpu"), [Shard(0)]))
    optimizer = torch.optim.AdamW([weight], fused=True)
    shards.set_parts(optimizer, {"weight": weight}, state_of)
    assert {key: value.device.type for key, value in optimizer.state[weight].items()} == dict.fromkeys(
        ("step", "exp_avg", "exp_avg_sq"), "meta"
    )


def test_zero3_has_it_there_too(monkeypatch):
    for name in ("set_weight", "safe_set_local_fp32_param", "safe_set_local_optimizer_state", "_part_of"):
        monkeypatch.setattr(zero3_parts, name, lambda *_: None)  # they need DeepSpeed's parameters
    vector = torch.empty(8, device="meta")
    optimizer = SimpleNamespace(optimizer=torch.optim.AdamW([vector]), fp32_partitioned_groups_flat=[vector])
    zero3_parts.set_parts(optimizer, {"weight": None}, state_of)
    assert optimizer.optimizer.state[vector]["step"].device.type == "meta"
