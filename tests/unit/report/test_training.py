"""The command that trains by a plan."""

import pytest

from sft_play.report.layout import training_command
from tests.plans import plan_with
from tests.unit.train.plans import PLAN


@pytest.mark.parametrize(
    "world_size, machines, engine, device, command",
    [
        (1, 1, "none", "cuda", "make train"),
        (8, 1, "fsdp2", "cuda", "make train-fsdp NGPU=8"),
        (16, 2, "fsdp2", "cuda", "make train-slurm NODES=2 NGPU=8 ENGINE=fsdp2"),
        (12, 2, "ddp", "cuda", "make train-slurm NODES=2 NGPU=6 ENGINE=ddp"),
        (16, 1, "ddp", "cuda", "make train-distributed NGPU=16"),
        (16, 1, "ddp", "cpu", "make train-distributed NGPU=16"),
    ],
)
def test_a_run_is_started_on_the_machines_that_it_is_planned_for(
    world_size, machines, engine, device, command
):
    plan = plan_with(PLAN, world_size=world_size, machines=machines, engine=engine, device=device)
    assert training_command(plan) == command


def test_config_and_settings_are_part_of_the_command():
    typed = training_command(PLAN, "configs/demo.yaml", ["train.max_steps=3"])
    assert typed == 'make train CONFIG=configs/demo.yaml ARGS="train.max_steps=3"'
