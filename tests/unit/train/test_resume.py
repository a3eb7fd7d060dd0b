"""What machines with run directories of their own agree to resume from."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from sft_play.errors import CheckpointError
from sft_play.runlog import RunDir
from sft_play.train import resume
from tests.unit.train.test_checkpoints import make, names


@pytest.fixture
def machines(tmp_path, monkeypatch):
    """Two machines of two processes; what one says reaches the other."""
    jobs = [
        SimpleNamespace(
            run=RunDir(tmp_path / f"machine{number}", shared=False),
            ranks=SimpleNamespace(rank=2 * number),
            config=SimpleNamespace(train=SimpleNamespace(resume="auto")),
            keeps_files=True,
        )
        for number in range(2)
    ]
    real = resume._offer
    monkeypatch.setattr(resume, "_offer", lambda _, at_most: [real(job, at_most) for job in jobs])
    monkeypatch.setattr(resume, "from_all", lambda offers: offers)
    return jobs


def with_losses(run: RunDir, step: int, loss: float, **changes) -> Path:
    state = {"global_step": step, "log_history": [{"step": step, "loss": loss}]}
    return make(run, step, sealed=False, **{"trainer_state.json": json.dumps(state), **changes})


def test_the_newest_that_all_machines_hold_is_taken(machines, capsys):
    """The first machine was killed before it published step 6; the second holds a damaged step 4."""
    one, two = (job.run for job in machines)
    for step in (2, 4):
        with_losses(one, step, 0.5)
    for step in (2, 4, 6):
        with_losses(two, step, 0.5, **({"optimizer.pt": "cut"} if step == 4 else {}))
    offers = resume._agreed_offers(machines[0])
    assert [offer.path for offer in offers] == [run.checkpoints / "checkpoint-2" for run in (one, two)]
    assert capsys.readouterr().out.count("checkpoint-4 is damaged") == 1
    assert names(two) == ["checkpoint-2", "checkpoint-4.damaged", "checkpoint-6"]


def test_none_on_any_machine_is_a_run_from_scratch(machines):
    assert [offer.path for offer in resume._agreed_offers(machines[1])] == [None, None]


@pytest.mark.parametrize("second", [None, 0.25], ids=["none", "of another run"])
def test_machines_that_hold_nothing_in_common_are_told_so(machines, second):
    with_losses(machines[0].run, 2, 0.5)
    if second:
        with_losses(machines[1].run, 2, second)
    with pytest.raises(CheckpointError, match="(?s)do not hold the same checkpoint.*rank 0: .*-2.*rank 2: "):
        resume._agreed_offers(machines[0])
