from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sft_play import cli
from sft_play.builtin.demo import materialise
from sft_play.commands import scaling
from sft_play.commands.train import close, compare, is_finished, opened_job
from sft_play.config.load import ResolvedConfig, dump_resolved
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.job import begin_run
from sft_play.machine.gpus import detect
from sft_play.runlog import RunDir, update_summary
from tests.unit.finished_run import make_config


@pytest.fixture
def resolved(tiny_model, tmp_path, monkeypatch):
    """`resolved(**eval settings)`: a config that opened_job takes."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return lambda **settings: ResolvedConfig(
        make_config(tiny_model, tmp_path, **settings), {}, Path("x.yaml")
    )


def test_a_finished_run_of_built_in_rows_is_known_by_the_names_that_people_type(tmp_path, monkeypatch):
    data = {"train_path": "builtin:demo", "val_path": "builtin:demo"}
    typed = ResolvedConfig(RunConfig.model_validate({"model": {"name": "x"}, "data": data}), {}, "x.yaml")
    run = RunDir(tmp_path)
    run.config.write_text(dump_resolved(materialise(typed)))
    update_summary(run, status="done")
    monkeypatch.setattr("sft_play.commands.train.finished_weights", lambda config, run: run.model)
    assert is_finished(run, typed)
    other = typed.config.data.model_copy(update={"limit": 5})
    assert not is_finished(run, replace(typed, config=typed.config.model_copy(update={"data": other})))


@pytest.mark.thorough
def test_an_answer_pattern_that_no_reference_holds_is_said_before_training(resolved):
    with pytest.raises(ConfigError, match="'####' matches none of the 24 references"):
        with opened_job(resolved(answer_pattern="####"), 1):
            pass


@pytest.mark.thorough
def test_a_run_that_ends_without_answers_does_not_look_for_the_pattern(resolved):
    with opened_job(resolved(answer_pattern="####", generate=False), 1) as job:
        assert job.plan.sharing.world_size == 1


def test_a_model_that_is_too_large_to_answer_on_one_device_ends_no_run(resolved, monkeypatch, capsys):
    def runs_out(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("sft_play.commands.evaluate.before_after", runs_out)
    with opened_job(resolved(), 1) as job:
        pass
    assert compare(job) == []
    assert "no answers are compared: the model does not fit on one device" in capsys.readouterr().out


@pytest.mark.thorough
def test_a_run_of_several_processes_ends_without_plans_for_others_which_its_report_makes(
    resolved, monkeypatch, capfd
):
    made = []
    monkeypatch.setattr("sft_play.planning.allowed.describe", made.append)
    with opened_job(resolved(generate=False), 2) as job:
        begin_run(job)
        job.run.adapter.mkdir()
        made.clear()
        update_summary(job.run, status="trained", world_size=2)
        close(job)
    said = capfd.readouterr().out
    assert not made and "other numbers" not in said and not job.run.scaling.exists()
    assert "plans the same run on other numbers of processes" in job.run.report.read_text()
    report = ["report", job.run.path.name, "--runs", str(job.run.path.parent)]
    there = replace(detect(), host=replace(detect().host, cpu_model="another"))
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(scaling, "detect", lambda: there)
        assert cli.main(report) == 0 and not made
    assert "this machine has another" in " ".join(capfd.readouterr().out.split())
    assert cli.main(report) == 0 and made
    page = job.run.report.read_text()
    assert (
        "2\u00a0(this\u00a0run)" in page and "The same run on other numbers of processes, predicted" in page
    )
    written = job.run.scaling.stat().st_mtime_ns
    assert cli.main(report) == 0 and job.run.scaling.stat().st_mtime_ns == written
