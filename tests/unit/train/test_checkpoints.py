import json
import pickle
from pathlib import Path

import pytest
import torch

from sft_play.config.schema import RunConfig
from sft_play.engines.registry import engine_of
from sft_play.errors import CheckpointError
from sft_play.manifest import files_in, hash_files, write_manifest
from sft_play.runlog import RunDir
from sft_play.train.checkpoints import (
    delete_old,
    find_problem,
    is_split_as,
    newest_whole,
    require_movable,
    saved_by,
    set_aside_stale,
)
from sft_play.train.pickles import FORCE, only_tensors
from tests.plans import plan_with
from tests.unit.train.plans import PLAN


def make(run: RunDir, step: int, *, sealed: bool = True, **changes) -> Path:
    folder = run.checkpoints / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    torch.save({"state": {}}, folder / "optimizer.pt")
    files = {"trainer_state.json": json.dumps({"global_step": step}), "adapter_model.safetensors": "x"}
    for name, text in files.items():
        (folder / name).write_text(text)
    if sealed:
        write_manifest(folder, {}, hash_files(folder, files_in(folder)))
    for name, text in changes.items():
        (folder / name).write_text(text) if text is not None else (folder / name).unlink()
    return folder


def names(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def config(optimizer: str) -> RunConfig:
    tree = {"model": {"name": "m"}, "data": {"train_path": "d"}, "train": {"optimizer": optimizer}}
    return RunConfig.model_validate(tree)


@pytest.mark.parametrize("sealed", [True, False], ids=["with a manifest", "of an earlier version"])
def test_the_newest_whole_checkpoint_is_taken_and_damaged_ones_are_set_aside_and_named(tmp_path, sealed):
    run = RunDir(tmp_path)
    make(run, 9, sealed=sealed)
    newest = make(run, 10, sealed=sealed)
    make(run, 11, sealed=sealed, **{"optimizer.pt": None})
    make(run, 12, sealed=sealed, **{"adapter_model.safetensors": None})
    make(run, 100, sealed=sealed, **{"trainer_state.json": '{"global_st'})
    found, lines = newest_whole(run)
    assert found == newest
    assert [line.split(":")[0] for line in lines] == [
        f"checkpoint-{step} is damaged" for step in (100, 12, 11)
    ]
    assert lines[0].endswith("it was moved to checkpoint-100.damaged")
    assert names(run) == [
        "checkpoint-10", "checkpoint-100.damaged", "checkpoint-11.damaged", "checkpoint-12.damaged", "checkpoint-9",
    ]  # fmt: skip
    assert newest_whole(run) == (newest, [])
    assert newest_whole(run, at_most=9)[0] == run.checkpoints / "checkpoint-9"
    assert newest_whole(run, at_most=8) == (None, [])


def test_a_run_without_checkpoints_starts_anew_also_if_it_was_killed_in_its_first_save(tmp_path):
    run = RunDir(tmp_path)
    assert newest_whole(run) == (None, [])
    (run.checkpoints / "incomplete" / "checkpoint-3").mkdir(parents=True)
    assert newest_whole(run) == (None, [])


def test_when_none_is_left_that_is_an_error_every_time(tmp_path):
    run = RunDir(tmp_path)
    make(run, 3, **{"optimizer.pt": "cut"})
    for _ in range(2):
        with pytest.raises(CheckpointError, match="(?s)no checkpoint is left .*checkpoint-3.*make train"):
            newest_whole(run)
    assert names(run) == ["checkpoint-3.damaged"]


def test_links_and_other_names_are_ignored_with_a_reason(tmp_path):
    run = RunDir(tmp_path / "run")
    whole = make(run, 2)
    outside = make(RunDir(tmp_path / "outside"), 7)
    (run.checkpoints / "checkpoint-7").symlink_to(outside)
    (run.checkpoints / "checkpoint-8").symlink_to(run.checkpoints / "checkpoint-8")
    (run.checkpoints / "checkpoint-abc").mkdir()
    (run.checkpoints / "checkpoint-9").write_text("a file")
    found, lines = newest_whole(run)
    assert found == whole
    assert [line.partition(" i")[0] for line in lines] == [f"checkpoint-{end}" for end in (7, 8, "abc", 9)]
    assert "symbolic link" in lines[0] and "not checkpoint-<step>" in lines[2] and "damaged" in lines[3]


@pytest.mark.parametrize("text", ["null", "[1]", '{"unknown": 1, "global_step": 5}', "[" * 10**5, "\udcff"])
def test_a_trainer_state_that_is_something_else_is_damage(tmp_path, text):
    folder = make(RunDir(tmp_path), 5, sealed=False)
    (folder / "trainer_state.json").write_bytes(text.encode(errors="surrogateescape"))
    assert find_problem(folder) == "trainer_state.json is missing or truncated"


class Payload:
    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self):
        return Path.touch, (self.canary,)


@pytest.mark.parametrize(
    ("file", "write"),
    [
        ("optimizer.pt", torch.save),
        ("rng_state.pth", torch.save),
        ("scheduler.pt", lambda value, path: path.write_bytes(pickle.dumps(value))),
        ("global_step5/zero_pp_rank_0_mp_rank_00_optim_states.pt", torch.save),
        ("global_step5/mp_rank_00_model_states.pt", torch.save),
        ("pytorch_model.bin", torch.save),
    ],
)
@pytest.mark.parametrize("sealed", [True, False])
def test_a_pickled_payload_is_refused_and_does_not_run(tmp_path, file, write, sealed):
    folder, canary = make(RunDir(tmp_path), 5, sealed=False), tmp_path / "canary"
    (folder / file).parent.mkdir(exist_ok=True)
    write({"state": Payload(canary)}, folder / file)
    if sealed:  # by whoever planted it
        write_manifest(folder, {}, hash_files(folder, files_in(folder)))
    assert Path(file).name in find_problem(folder)
    assert not canary.exists()


def test_a_checkpoint_whose_index_lists_other_files_is_damaged(tmp_path):
    folder = make(RunDir(tmp_path), 5, sealed=False)
    assert find_problem(folder) is None
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"w": "../5/w.safetensors"}}')
    assert "lists '../5/w.safetensors', no *.safetensors beside it" in find_problem(folder)


def test_no_library_can_load_other_objects_while_a_run_is_resumed(tmp_path, monkeypatch):
    canary = tmp_path / "canary"
    torch.save({"state": Payload(canary)}, tmp_path / "file.pt")
    monkeypatch.delenv(FORCE, raising=False)
    with only_tensors(engine_of("deepspeed_z2")), pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "file.pt", weights_only=False)  # as DeepSpeed does
    assert not canary.exists()
    torch.load(tmp_path / "file.pt", weights_only=False)
    assert canary.exists()  # outside of it, the payload works


def test_checkpoints_after_the_one_that_is_resumed_are_set_aside(tmp_path):
    run = RunDir(tmp_path / "run")
    for step in (2, 4, 6):
        make(run, step)
    (run.checkpoints / "checkpoint-6.stale").mkdir()
    (tmp_path / "link").symlink_to(run.path)
    resumed = RunDir(tmp_path / "link").checkpoints / "checkpoint-4"
    assert set_aside_stale(run, resumed) == ["checkpoint-6.stale-2"]
    assert newest_whole(run)[0] == run.checkpoints / "checkpoint-4"
    other = make(RunDir(tmp_path / "other"), 3)
    assert set_aside_stale(run, other) == ["checkpoint-2.stale", "checkpoint-4.stale"]


def test_the_newest_two_and_the_best_are_kept_whatever_their_dates(tmp_path):
    run = RunDir(tmp_path / "run")
    for step in (12, 10, 8, 6, 4):  # the newest has the oldest date
        make(run, step)
    (run.checkpoints / "checkpoint-1").symlink_to(tmp_path)
    (run.checkpoints / "checkpoint-2.damaged").mkdir()
    delete_old(run, 1, run.checkpoints / "checkpoint-6")
    kept = ["checkpoint-1", "checkpoint-10", "checkpoint-12", "checkpoint-2.damaged", "checkpoint-6"]
    assert names(run) == kept
    delete_old(run, 3, None)
    assert names(run) == kept


@pytest.mark.parametrize(
    ("shards", "engine", "world", "moves"),
    [
        (2, "deepspeed_z2", 2, False),
        (0, "ddp", 4, False),
        (0, "none", 1, False),
        (2, "ddp", 2, "make train NGPU=2 ARGS=.parallel.engine=deepspeed_z2"),
        (2, "none", 1, "make train NGPU=2 ARGS=.parallel.engine=deepspeed_z2"),
        (4, "deepspeed_z2", 2, "make train NGPU=4 ARGS=.parallel.engine=deepspeed_z2"),
        (0, "deepspeed_z2", 2, "make train NGPU=2 ARGS=.parallel.engine=ddp"),
    ],
)
def test_optimizer_state_that_was_split_otherwise_is_converted_if_it_is_adamws(
    tmp_path, shards, engine, world, moves
):
    (tmp_path / "global_step3").mkdir()
    for rank in range(shards):
        (tmp_path / "global_step3" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    plan = plan_with(PLAN, engine=engine, world_size=world)
    assert require_movable(tmp_path, config("adamw"), plan, plan.sharing.world_size) == bool(moves)
    if not moves:
        assert not require_movable(tmp_path, config("adamw_8bit"), plan, plan.sharing.world_size)
        return
    with pytest.raises(CheckpointError, match=moves):
        require_movable(tmp_path, config("adamw_8bit"), plan, plan.sharing.world_size)


def test_parts_of_many_ranks_come_in_their_order(tmp_path):
    (tmp_path / "global_step3").mkdir()
    for rank in range(12):
        (tmp_path / "global_step3" / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    assert [path.name.split("_")[4] for path in saved_by(tmp_path).state_files(tmp_path)] == [
        str(rank) for rank in range(12)
    ]


def test_without_a_shared_disk_a_machine_has_the_parts_of_its_own_processes(tmp_path):
    folder = tmp_path / "global_step4"
    folder.mkdir()
    for rank in (2, 3):
        (folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    assert is_split_as(tmp_path, engine_of("deepspeed_z2"), 2)
    assert not is_split_as(tmp_path, engine_of("deepspeed_z2"), 4)


def test_the_manifest_says_which_engine_saved_a_checkpoint_and_an_unknown_one_is_refused(tmp_path):
    (tmp_path / "global_step3").mkdir()
    (tmp_path / "global_step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    assert saved_by(tmp_path).name == "deepspeed_z2"  # of an earlier version, without a manifest
    write_manifest(tmp_path, {"engine": "ddp"}, {})
    assert saved_by(tmp_path).name == "ddp"
    write_manifest(tmp_path, {"engine": "of tomorrow"}, {})
    with pytest.raises(CheckpointError, match="engine of tomorrow, which this version lacks"):
        saved_by(tmp_path)
