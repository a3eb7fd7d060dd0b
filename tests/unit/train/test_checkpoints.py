import json
from dataclasses import replace

import pytest

from sft_play.config.schema import RunConfig
from sft_play.errors import CheckpointError
from sft_play.runlog import RunDir
from sft_play.train.checkpoints import find_checkpoint, is_split_as, require_movable, shards_of
from tests.unit.train.plans import PLAN


def make(run: RunDir, step: int, **changes) -> None:
    folder = run.checkpoints / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    files = {
        "trainer_state.json": json.dumps({"global_step": step}),
        "adapter_model.safetensors": "x",
        "optimizer.pt": "x",
    }
    for name, text in (files | changes).items():
        if text is not None:
            (folder / name).write_text(text)


def config(optimizer: str) -> RunConfig:
    tree = {"model": {"name": "m"}, "data": {"train_path": "d"}, "train": {"optimizer": optimizer}}
    return RunConfig.model_validate(tree)


def test_the_newest_whole_checkpoint_is_taken_and_the_others_are_named(tmp_path):
    run = RunDir(tmp_path)
    make(run, 9)
    make(run, 10)
    make(run, 11, **{"optimizer.pt": None})
    make(run, 12, **{"adapter_model.safetensors": None})
    make(run, 100, **{"trainer_state.json": '{"global_st'})
    (run.checkpoints / "checkpoint-abc").mkdir()
    found, passed_over = find_checkpoint(run, "auto")
    assert found == run.checkpoints / "checkpoint-10"
    assert [line.split(" skipped")[0] for line in passed_over] == [
        "checkpoint-100",
        "checkpoint-12",
        "checkpoint-11",
    ]


def test_never_and_nothing_there_start_anew(tmp_path):
    run = RunDir(tmp_path)
    assert find_checkpoint(run, "auto") == (None, [])
    make(run, 3)
    assert find_checkpoint(run, "never") == (None, [])


def test_a_checkpoint_that_was_asked_for_and_is_not_whole_is_an_error(tmp_path):
    run = RunDir(tmp_path)
    make(run, 5, **{"trainer_state.json": None})
    with pytest.raises(CheckpointError, match="trainer_state.json is missing or truncated"):
        find_checkpoint(run, str(run.checkpoints / "checkpoint-5"))


@pytest.mark.parametrize(
    ("shards", "engine", "world", "moves"),
    [
        (2, "deepspeed_z2", 2, False),
        (0, "ddp", 4, False),
        (0, "none", 1, False),
        (2, "ddp", 2, "make train-deepspeed NGPU=2"),
        (2, "none", 1, "make train-deepspeed NGPU=2"),
        (4, "deepspeed_z2", 2, "make train-deepspeed NGPU=4"),
        (0, "deepspeed_z2", 2, "make train-distributed NGPU=2"),
    ],
)
def test_optimizer_state_that_was_split_otherwise_is_converted_if_it_is_adamws(
    tmp_path, shards, engine, world, moves
):
    (tmp_path / "global_step3").mkdir()
    for rank in range(shards):
        (tmp_path / "global_step3" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    plan = replace(PLAN, engine=engine, world_size=world)
    assert require_movable(tmp_path, config("adamw"), plan, plan.world_size) == bool(moves)
    if not moves:
        assert not require_movable(tmp_path, config("adamw_8bit"), plan, plan.world_size)
        return
    with pytest.raises(CheckpointError, match=moves):
        require_movable(tmp_path, config("adamw_8bit"), plan, plan.world_size)


def test_parts_of_many_ranks_come_in_their_order(tmp_path):
    (tmp_path / "global_step3").mkdir()
    for rank in range(12):
        (tmp_path / "global_step3" / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    assert [path.name.split("_")[4] for path in shards_of(tmp_path)] == [str(rank) for rank in range(12)]


def test_without_a_shared_disk_a_machine_has_the_parts_of_its_own_processes(tmp_path, monkeypatch):
    folder = tmp_path / "global_step4"
    folder.mkdir()
    for rank in (2, 3):
        (folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    assert is_split_as(tmp_path, "deepspeed_z2", 2)
    assert not is_split_as(tmp_path, "deepspeed_z2", 4)
