"""How large a checkpoint is expected to be."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sft_play.config.schema import RunConfig
from sft_play.train.disk import checkpoint_bytes
from tests.plans import plan_with
from tests.unit.train.plans import PLAN


@pytest.mark.parametrize(
    ("engine", "optimizer", "least", "most"),
    [
        ("ddp", "adamw", 8, 8.001),  # two moments in fp32
        ("deepspeed_z2", "adamw", 12, 12),  # and the fp32 weights
        ("ddp", "adamw_8bit", 2, 2.2),  # two moments in a byte, with scales
        ("deepspeed_z2", "adamw_8bit", 6, 6.2),
        ("deepspeed_z3", "adamw", 12, 12),
    ],
)
def test_a_checkpoint_has_the_weights_and_what_the_optimizer_keeps_under_this_engine(
    engine, optimizer, least, most
):
    config = RunConfig.model_validate(
        {
            "model": {"name": "x"},
            "data": {"train_path": "x"},
            "tuning": {"mode": "full"},
            "train": {"optimizer": optimizer},
        }
    )
    model = torch.nn.Linear(512, 512, bias=False)
    job = SimpleNamespace(config=config, plan=plan_with(PLAN, engine=engine, world_size=2))
    session: Any = SimpleNamespace(job=job, trainer=SimpleNamespace(model=model))
    weights = model.weight.numel()
    if engine == "deepspeed_z3":  # a weight is nowhere as a whole
        model.weight.data, model.weight.ds_numel = torch.empty(0), weights
    assert least * weights <= checkpoint_bytes(session) - 4 * weights <= most * weights
