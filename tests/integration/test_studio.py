"""The studio as a person starts it, beside a run that trains."""

import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable

import psutil
import pytest

from sft_play.runlog import RunDir
from tests.integration.cli import finish, make_workspace, start

pytestmark = pytest.mark.integration
LONG = ("train.max_steps=120", "train.logging_steps=2", "train.probe=false", "eval.generate=false")


def fetch(address: str) -> str:
    with urllib.request.urlopen(address, timeout=60) as answer:
        return answer.read().decode()


def until(found: Callable[[], object], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.fixture
def studio(tmp_path):
    """The process and its address; on a port that is free, whatever others are in use."""
    process = start("studio", "--runs", tmp_path / "runs", COLUMNS="80")
    first, second = (process.stdout.readline() for _ in range(2))
    address = re.search(r"http://127\.0\.0\.1:\d+", first)[0]
    port = address.rpartition(":")[2]
    assert f"ssh -L {port}:127.0.0.1:{port} " in second
    yield process, address
    process.kill()
    process.communicate()


@pytest.mark.thorough
def test_a_run_is_seen_while_it_trains_and_when_it_has_ended(studio, tmp_path, tiny_model):
    process, address = studio
    assert "make train" in fetch(f"{address}/")  # before the first run
    config = make_workspace(tmp_path, tiny_model)
    training = start("train", "--config", config, *LONG)
    seen = ""

    def runs() -> bool:
        nonlocal seen
        assert training.poll() is None, training.communicate()
        seen = fetch(f"{address}/")
        return bool(re.search(r"step [1-9]\d* of 120, about", seen))

    until(runs, timeout_s=240)
    assert ">running <progress" in seen
    page = fetch(f"{address}/runs/one")
    assert re.search(r"Running: step [1-9]\d* of 120", page) and "Loss over optimizer steps" in page
    assert 'data-seconds="5"' in page and not RunDir(tmp_path / "runs" / "one").report.exists()
    assert finish(training, timeout_s=240).code == 0
    ended = fetch(f"{address}/runs/one")
    assert "Done." in ended and "data-seconds" not in ended
    # what the run itself wrote says the same, though it held the run while it wrote
    written = RunDir(tmp_path / "runs" / "one").report.read_text()
    assert (
        ended.partition("<main>")[2].partition("</main>")[0]
        == written.partition("<main>")[2].partition("</main>")[0]
    )
    process.send_signal(signal.SIGINT)
    done = finish(process, timeout_s=20)
    assert done.code == 0 and "stopped the studio" in done.out and done.err == ""
    with pytest.raises(urllib.error.URLError):
        fetch(f"{address}/")


@pytest.mark.slow
def test_a_plan_is_made_in_a_process_of_its_own_that_ends_with_the_studio(studio):
    process, address = studio
    page = f"{address}/plan?model=meta-llama/Llama-3.2-1B&gpu=NVIDIA+L4&gpus=1&method=lora"
    assert "Planning" in fetch(page)
    server = psutil.Process(process.pid)
    until(lambda: server.children(), timeout_s=10)
    until(lambda: "LoRA of meta-llama/Llama-3.2-1B fits on 1 x NVIDIA L4." in fetch(page), timeout_s=240)
    assert not server.children() and not any("libtorch" in file.path for file in server.memory_maps())
    assert "Planning" in fetch(page.replace("gpus=1", "gpus=2"))
    until(lambda: server.children(), timeout_s=10)
    planning = server.children()[0]
    process.send_signal(signal.SIGTERM)
    assert finish(process, timeout_s=20).code == 0
    until(lambda: not planning.is_running(), timeout_s=10)
