"""A model that each of two machines holds once, divided among its two processes, learns what one process does.

The machines are this one twice: which processes divide a replica follows from the plan and the ranks alone.
"""

import pytest
from safetensors import safe_open

from sft_play.train.run import train
from tests.integration.processes import assert_same_curve, launch_jobs
from tests.integration.test_many_processes import CLOSE, COMMON, KINDS, SAVED, saved_by
from tests.jobs import make_job

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

TRIED = ("lora-packed", "full-padded")
SETTINGS = {kind: {**COMMON, **KINDS[kind], "probe": False} for kind in TRIED}
ROWS = {
    kind: {**settings, "batch_size": settings["batch_size"] * 3 // 2} for kind, settings in SETTINGS.items()
}


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    """Runs of one process and of two machines with two each, and from their checkpoints to the other and to four."""
    found = tmp_path_factory.mktemp("machines")
    for kind, settings in SETTINGS.items():
        train(make_job(tiny_model, found, f"one-{kind}", **settings))
    jobs = {}
    for kind, settings in ROWS.items():
        saved = {name: saved_by(found, f"{name}-{kind}") for name in ("one", "two-by-two")}
        jobs[f"two-by-two-{kind}"] = {**settings, "machines": 2}
        # in three micro-batches, whose gradients are reduced among replicas once
        three = {"machines": 2, "batch_size": SETTINGS[kind]["batch_size"] // 2}
        jobs[f"from-one-{kind}"] = {**settings, **three, "resume": saved["one"]}
        jobs[f"to-four-{kind}"] = {**settings, "resume": saved["two-by-two"]}
    specs = [{"model": str(tiny_model), "name": name, "settings": one} for name, one in jobs.items()]
    launch_jobs(found, "fsdp2", 4, specs)
    for kind, settings in SETTINGS.items():
        resumed = {**settings, "resume": saved_by(found, f"two-by-two-{kind}")}
        train(make_job(tiny_model, found, f"to-one-{kind}", **resumed))
    return found


@pytest.mark.parametrize("kind", TRIED)
@pytest.mark.parametrize("name", ["two-by-two", "from-one", "to-four", "to-one"])
def test_replicas_learn_what_one_process_does_and_their_checkpoints_go_anywhere(folder, kind, name):
    after = 0 if name == "two-by-two" else SAVED
    assert_same_curve(folder / f"{name}-{kind}", folder / f"one-{kind}", CLOSE, after=after)


@pytest.mark.parametrize("kind", TRIED)
def test_one_replica_writes_the_optimizer_state(folder, kind):
    """Halves of each tensor, by the two processes of the first machine."""
    checkpoint = folder / f"two-by-two-{kind}" / "checkpoints" / f"checkpoint-{SAVED}"
    files = sorted(file.name for file in checkpoint.glob("optimizer_shard_*"))
    assert files == ["optimizer_shard_0.safetensors", "optimizer_shard_1.safetensors"]
    parts = [safe_open(checkpoint / file, "pt") for file in files]
    names = [name for name in sorted(parts[0].keys()) if name.endswith(":exp_avg")]
    rows = [sum(part.get_slice(name).get_shape()[0] for part in parts) for name in names]
    other = folder / f"one-{kind}" / "checkpoints" / f"checkpoint-{SAVED}"
    assert names and min(rows) > 0 and other.is_dir()
