"""A run is independent of its console: it may be a closed pipe, a full disk, or nothing at all."""

import subprocess
import sys

import pytest

from sft_play.runlog import RunDir, read_json
from tests.integration.cli import environment, make_workspace, sft

pytestmark = pytest.mark.integration

GONE = {
    "a closed pipe": "{ %s; echo $? >&3; } 2>&1 | true",
    "a full disk": "%s >/dev/full 2>/dev/full; echo $? >&3",
    "nothing": "%s <&- >&- 2>&-; echo $? >&3",
}


def code_of(console: str, *words: str) -> int:
    """The exit code of `python -m sft_play`, whose console is one of `GONE`."""
    command = GONE[console] % " ".join(f"'{word}'" for word in (sys.executable, "-m", "sft_play", *words))
    done = subprocess.run(
        ["bash", "-c", f"{{ {command}; }} 3>&1 >/dev/null"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    return int(done.stdout)


@pytest.fixture(scope="module")
def config(tiny_model, tmp_path_factory):
    return make_workspace(tmp_path_factory.mktemp("streams") / "work", tiny_model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("console", "processes"),
    [("a closed pipe", "1"), ("a closed pipe", "2"), ("a full disk", "1"), ("nothing", "2")],
)
def test_a_run_whose_output_cannot_be_written_goes_on_and_its_log_keeps_the_output(
    config, console, processes
):
    name = f"{console.replace(' ', '-')}-{processes}"
    words = (f"--config={config}", f"--processes={processes}", f"output.name={name}")
    code = code_of(console, "train", *words, "train.max_steps=2", "train.probe=false", "eval.generate=false")
    run = RunDir(config.parent / "runs" / name)
    assert code == 0 and read_json(run.summary)["status"] == "done"
    assert (run.adapter / "adapter_model.safetensors").exists()
    if console != "nothing":  # /dev/null takes everything
        assert "step 2/2" in run.log.read_text()


@pytest.mark.thorough
def test_a_chat_without_standard_streams_ends(finished):
    assert code_of("nothing", "infer", f"--config={finished.config}") == 0


@pytest.mark.parametrize(("console", "code"), [("a closed pipe", 0), ("a full disk", 6), ("nothing", 0)])
def test_a_command_that_only_prints_says_that_the_disk_is_full(console, code):
    assert code_of(console, "config-schema") == code


@pytest.mark.parametrize(("flags", "visible"), [([], "private"), (["--public"], "public")])
def test_push_says_who_will_see_it_before_it_uploads_anything(finished, monkeypatch, flags, visible):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    done = sft("push", "--config", finished.config, "--repo", "user/name", *flags)
    assert done.code == 2 and f"user/name on the Hugging Face Hub: {visible}" in " ".join(done.out.split())
