from pathlib import Path

import pytest
import torch

from sft_play.commands.train import compare, opened_job
from sft_play.config.load import ResolvedConfig
from sft_play.errors import ConfigError
from tests.unit.finished_run import make_config


@pytest.fixture
def resolved(tiny_model, tmp_path, monkeypatch):
    """`resolved(**eval settings)`: a config that opened_job takes."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return lambda **settings: ResolvedConfig(
        make_config(tiny_model, tmp_path, **settings), {}, Path("x.yaml")
    )


def test_an_answer_pattern_that_no_reference_holds_is_said_before_training(resolved):
    with pytest.raises(ConfigError, match="'####' matches none of the 24 references"):
        with opened_job(resolved(answer_pattern="####"), 1):
            pass


def test_a_run_that_ends_without_answers_does_not_look_for_the_pattern(resolved):
    with opened_job(resolved(answer_pattern="####", generate=False), 1) as job:
        assert job.plan.world_size == 1


def test_a_model_that_is_too_large_to_answer_on_one_device_ends_no_run(resolved, monkeypatch, capsys):
    def runs_out(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("sft_play.commands.evaluate.before_after", runs_out)
    with opened_job(resolved(), 1) as job:
        pass
    assert compare(job) is None
    assert "no answers are compared: the model does not fit on one device" in capsys.readouterr().out
