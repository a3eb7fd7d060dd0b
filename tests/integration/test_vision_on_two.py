"""Runs on rows with images learn on two processes what they do on one, and take the memory that was foreseen.

The last half of the rows has no image, so a process often has none.
"""

import json

import pytest

from sft_play.train.run import train
from tests.integration.processes import CLOSE, assert_same_curve, launch_jobs
from tests.integration.test_vision_run import ROWS, image_rows
from tests.jobs import make_job
from tests.vision_models import model_folder

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
KINDS = {
    "smolvlm": {"mode": "full", "vision": "full"},
    "gemma": {"mode": "lora", "vision": "lora"},
    "qwen35": {"mode": "full", "vision": "full", "padding_free": False},
    "qwen": {"mode": "lora", "gradient_checkpointing": True},
}
ENGINES = ("ddp", "deepspeed_z2", "fsdp2", "deepspeed_z3")
LESS = {("deepspeed_z3", "backward"): 5e-3}  # than predicted: up to a tensor of hidden states
# gloo's thread may let go of a layer's gathered weights only after DeepSpeed's wait for them: with a pause after each
# wait, twelve probes of twelve measured the prediction; without, a third of them up to 4% more
MORE = {"deepspeed_z3": 0.05}
COMMON = {
    "batch_size": 2, "effective_batch_size": ROWS, "max_steps": 3, "learning_rate": 1e-3, "weight_decay": 0.1,
}  # fmt: skip
KEPT = {key: tolerance for key, tolerance in CLOSE.items() if not key.startswith("eval/")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With the runs of one process."""
    folder = tmp_path_factory.mktemp("two")
    data = str(image_rows(folder / "data"))
    for kind, settings in KINDS.items():
        settings |= COMMON | {"data": data}
        train(make_job(model_folder(kind, folder / kind), folder, f"one-{kind}", **settings))
    return folder


@pytest.fixture(scope="module", params=ENGINES)
def engine(request, folder):
    """An engine, after its runs on two processes."""
    specs = []
    for kind, settings in KINDS.items():
        for name, more in (("two", {}), ("probed", {"batch_size": "auto", "probe": True})):
            spec = {"model": str(folder / kind), "name": f"{request.param}-{name}-{kind}"}
            specs.append(spec | {"settings": settings | more, "only_plan": name == "probed"})
    launch_jobs(folder, request.param, 2, specs, forked=not request.param.startswith("deepspeed"))
    return request.param


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_learn_from_images_what_one_does(engine, folder, kind):
    tolerances = KEPT if kind != "qwen35" else dict.fromkeys(KEPT, 1e-4)  # rounds in chunks of a padded row
    assert_same_curve(folder / f"{engine}-two-{kind}", folder / f"one-{kind}", tolerances)


@pytest.mark.parametrize("kind", KINDS)
def test_their_probes_measure_what_was_predicted(engine, folder, kind):
    """In the phase that decides; in an update, less than that may be there."""
    for rank in (0, 1):
        found = json.loads((folder / f"{engine}-probed-{kind}" / f"probed.{rank}.json").read_text())
        measured, predicted = found["measured"], found["predicted"]
        for phase in ("forward", "backward"):
            least, most = 1 - LESS.get((engine, phase), 1e-3), 1 + MORE.get(engine, 1e-3)
            assert least < measured[phase] / predicted[phase] < most
        assert measured["optimizer"] < 1.001 * max(predicted.values())
