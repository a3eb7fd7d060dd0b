"""What a run says of its speed: waiting for data, and the share of the device's peak."""

from dataclasses import replace

import pytest

from sft_play.machine.gpus import what_if
from sft_play.runlog import read_json, read_metrics
from sft_play.train.run import train
from sft_play.train.session import flops_share
from tests.jobs import make_job
from tests.plans import plan_with


@pytest.mark.thorough
def test_a_run_says_how_long_it_waited_for_data_and_no_mfu_without_a_known_peak(tiny_model, tmp_path):
    job = make_job(tiny_model, tmp_path, "numbers", batch_size=4)
    train(job)
    summary = read_json(job.run.summary)
    assert 0 < summary["data_wait"] < 0.5 and summary["mfu"] is None
    logged = [record for record in read_metrics(job.run) if "train/loss" in record]
    assert logged[0]["speed/data_wait"] is None and 0 < logged[-1]["speed/data_wait"] < 0.5
    assert all(record["speed/mfu"] is None for record in logged)
    rows = logged[-1]["speed/samples_per_second"] * logged[-1]["speed/step_seconds"]
    assert rows == pytest.approx(job.plan.batch.effective)


def test_the_share_of_the_peak_is_that_of_the_usual_formula(tiny_model, tmp_path):
    job = make_job(tiny_model, tmp_path, "peak", mode="full")
    machine = what_if("H100 80GB", 2)
    one, two = (
        flops_share(replace(job, machine=machine, plan=plan_with(job.plan, device="cuda", world_size=count)))
        for count in (1, 2)
    )
    parameters = job.architecture.vocab_size * job.architecture.hidden_size  # the head alone: a lower bound
    assert one > 6 * parameters / (machine.gpus[0].tflops * 1e12)
    assert two == pytest.approx(one / 2)
