import json
from dataclasses import replace

import pytest

from sft_play.errors import CheckpointError
from sft_play.runlog import RunDir
from sft_play.train.checkpoints import find_checkpoint, require_same_split
from tests.unit.train.plans import PLAN


def make(run: RunDir, step: int, **changes) -> None:
    folder = run.checkpoints / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    files = {"trainer_state.json": json.dumps({"global_step": step}), "adapter_model.safetensors": "x", "optimizer.pt": "x"}
    for name, text in (files | changes).items():
        if text is not None:
            (folder / name).write_text(text)


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
    assert [line.split(" passed")[0] for line in passed_over] == ["checkpoint-100", "checkpoint-12", "checkpoint-11"]


def test_never_and_nothing_there_start_anew(tmp_path):
    run = RunDir(tmp_path)
    assert find_checkpoint(run, "auto") == (None, [])
    make(run, 3)
    assert find_checkpoint(run, "never") == (None, [])


def test_a_checkpoint_that_was_asked_for_and_is_not_whole_is_an_error(tmp_path):
    run = RunDir(tmp_path)
    make(run, 5, **{"trainer_state.json": None})
    with pytest.raises(CheckpointError, match="trainer_state.json is missing or cut"):
        find_checkpoint(run, str(run.checkpoints / "checkpoint-5"))


@pytest.mark.parametrize(
    ("shards", "engine", "world", "said"),
    [
        (2, "deepspeed_z2", 2, None),
        (0, "ddp", 4, None),
        (0, "none", 1, None),
        (2, "ddp", 2, "make train-deepspeed NGPU=2"),
        (2, "none", 1, "make train-deepspeed NGPU=2"),
        (4, "deepspeed_z2", 2, "make train-deepspeed NGPU=4"),
        (0, "deepspeed_z2", 2, "make train-distributed NGPU=2"),
    ],
)
def test_optimizer_state_goes_on_as_it_was_split_or_not_at_all(tmp_path, shards, engine, world, said):
    (tmp_path / "global_step3").mkdir()
    for rank in range(shards):
        (tmp_path / "global_step3" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    plan = replace(PLAN, engine=engine, world_size=world)
    if said is None:
        require_same_split(tmp_path, plan)
        return
    with pytest.raises(CheckpointError, match=said):
        require_same_split(tmp_path, plan)
