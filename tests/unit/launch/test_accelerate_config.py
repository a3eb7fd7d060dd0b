import io
import sys

import pytest
import yaml

from sft_play.errors import ConfigError
from sft_play.launch.accelerate_config import (
    default_config,
    default_config_path,
    setup_accelerate,
)
from sft_play.machine.gpus import Machine, detect_host, what_if

CPU_ONLY = Machine(gpus=(), note="no driver", host=detect_host())


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("machine", "kind", "count", "cpu"),
    [
        (what_if("RTX 4090", 1), "NO", 1, False),
        (what_if("RTX 4090", 4), "MULTI_GPU", 4, False),
        (CPU_ONLY, "MULTI_GPU", 2, True),
    ],
    ids=["one GPU", "four GPUs", "CPU"],
)
def test_the_config_fits_the_machine(machine, kind, count, cpu):
    tree = yaml.safe_load(default_config(machine))
    assert (tree["distributed_type"], tree["num_processes"], tree["use_cpu"]) == (kind, count, cpu)


def test_auto_writes_the_file_and_keeps_the_earlier_one(capsys):
    assert setup_accelerate(True, CPU_ONLY) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"wrote {default_config_path()}" in said and "num_processes: 2" in said
    assert "next .venv/bin/accelerate launch scripts/train_distributed.py --config" in said
    first = default_config_path().read_text()
    assert setup_accelerate(True, CPU_ONLY) == 0 and not list(default_config_path().parent.glob("*.before"))
    assert setup_accelerate(True, what_if("RTX 4090", 2)) == 0
    assert default_config_path().with_suffix(".yaml.before").read_text() == first


def test_the_wizard_needs_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(ConfigError, match="in a terminal; `make setup-accelerate AUTO=1` needs none"):
        setup_accelerate(False)


def test_the_file_is_where_accelerate_reads_it(monkeypatch):
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(default_config_path()) == "/somewhere/huggingface/accelerate/default_config.yaml"
