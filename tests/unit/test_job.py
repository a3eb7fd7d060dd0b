from dataclasses import replace
from pathlib import Path

import pytest

from sft_play.cache import cache_dir
from sft_play.config.load import ResolvedConfig
from sft_play.config.schema import RunConfig
from sft_play.data.prepare import PreparedData
from sft_play.errors import LaunchError
from sft_play.job import Job, agreed_plan, begin_run, environment_of, job_digest
from sft_play.launch.ranks import RankEnvironment
from sft_play.machine.gpus import what_if
from sft_play.plan import Memory
from sft_play.runlog import RunDir, read_json
from tests.plans import plan_with
from tests.unit.train.plans import PLAN


def plan(budget: int, **changes) -> dict:
    memory = Memory(budget_bytes=budget, peak_bytes=1, peak_phase="forward", phases={"forward": 1}, terms={})
    return plan_with(PLAN, memory=memory, **changes).to_json()


def job(cache: Path, *, output: str = "runs", rate: float = 1e-4, rows: str = "abc") -> Job:
    tree = {
        "model": {"name": str(cache / "tiny")},
        "data": {"train_path": "x"},
        "train": {"learning_rate": rate},
    }
    config = RunConfig.model_validate({**tree, "output": {"dir": output}})
    data = PreparedData(train=None, val=None, test=None, max_seq_len=8, stats={}, cache_path=cache / rows)
    return Job(ResolvedConfig(config, {}, Path("x.yaml")), RunDir(Path(output)), None, None, data, None, PLAN)


@pytest.mark.parametrize(
    ("rank", "local_rank", "shared", "keeps"),
    [(0, 0, True, True), (0, 0, False, True), (2, 0, True, False), (2, 0, False, True), (3, 1, False, False)],
)
def test_one_process_keeps_the_run_directory_and_one_on_each_machine_without_a_shared_disk(
    tmp_path, rank, local_rank, shared, keeps
):
    ranks = RankEnvironment(rank=rank, local_rank=local_rank, world_size=4, local_world_size=2)
    asked = replace(job(tmp_path), run=RunDir(tmp_path, shared), ranks=ranks)
    assert asked.keeps_files is keeps


def test_the_plan_of_the_one_with_the_least_memory_is_everybodys():
    chosen = agreed_plan([("same", plan(300)), ("same", plan(100, micro_batch_size=2)), ("same", plan(200))])
    assert (chosen.memory.budget_bytes, chosen.batch.micro) == (100, 2)


@pytest.mark.parametrize(
    ("offers", "words"),
    [
        ([("one", plan(1)), ("other", plan(1))], "different settings or data"),
        ([("same", plan(1)), ("same", plan(1, device="cuda"))], "found a GPU"),
    ],
)
def test_those_who_differ_do_not_start(offers, words):
    with pytest.raises(LaunchError, match=words):
        agreed_plan(offers)


def test_settings_and_data_are_compared_and_places_are_not(tmp_path, monkeypatch):
    def of(cache: str, **changes) -> str:
        monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / cache))
        return job_digest(job(cache_dir(), **changes))

    assert of("here") == of("there") == of("here", output="/scratch/runs")
    assert len({of("here"), of("here", rate=2e-4), of("here", rows="abd")}) == 3


def test_the_environment_names_versions_and_hardware_but_not_the_one_device():
    found = environment_of(what_if("RTX 4090", 2))
    assert found["versions"]["torch"] and found["cpu_cores"] >= 1 and found["ram_bytes"] > 0
    assert [gpu["name"] for gpu in found["gpus"]] == ["NVIDIA GeForce RTX 4090"] * 2
    assert "uuid" not in str(found)


def test_a_resumed_run_keeps_when_and_how_it_was_started(tmp_path):
    begun = replace(job(tmp_path), run=RunDir(tmp_path / "one"), machine=what_if("L4"))
    config = begun.config.changed({"train.resume": "auto"})
    begun = replace(begun, resolved=replace(begun.resolved, config=config))
    first = {"started": "2026-11-20 10:30", "command": "make train CONFIG=my.yaml"}
    begun.run.path.mkdir()
    begun.run.write_json(begun.run.environment, first)
    begun.run.write_json(begun.run.base, {})
    begin_run(replace(begun, checkpoint=tmp_path / "checkpoint-4"))
    found = read_json(begun.run.environment)
    assert {key: found[key] for key in first} == first and found["resumed"] > first["started"]
    begin_run(replace(begun, checkpoint=None))
    found = read_json(begun.run.environment)
    assert found["command"] == "make train CONFIG=x.yaml" and "resumed" not in found
