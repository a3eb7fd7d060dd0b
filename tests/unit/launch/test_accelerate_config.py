import pytest
import yaml

from sft_play.engines.registry import engine_of
from sft_play.launch.accelerate_config import (
    default_config,
    default_config_path,
    setup_accelerate,
    stale_default_config,
)
from sft_play.machine.gpus import Machine, detect_host, what_if

CPU_ONLY = Machine(gpus=(), note="no driver", host=detect_host())

DDP = engine_of("ddp")


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
    assert (
        stale_default_config(2, DDP) is None
        and stale_default_config(2, engine_of("deepspeed_z2")) is not None
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_processes: 8\ndistributed_type: MULTI_GPU\n", "num_processes 8 instead of 2"),
        ("num_processes: 2\ndistributed_type: 'NO'\n", "distributed_type NO instead of MULTI_GPU"),
        ("[1\n", "not valid YAML"),
    ],
)
def test_a_stale_file_in_the_home_folder_is_told_of(text, message):
    default_config_path().parent.mkdir(parents=True)
    default_config_path().write_text(text)
    assert message in stale_default_config(2, DDP)


@pytest.mark.parametrize("kind", ["not UTF-8", "a folder"])
def test_a_file_in_the_home_folder_that_cannot_be_read_is_told_of(kind):
    default_config_path().parent.mkdir(parents=True)
    if kind == "a folder":
        default_config_path().mkdir()
    else:
        default_config_path().write_bytes(b"num_processes: \xff")
    assert "remove it, or run `make setup-accelerate`" in stale_default_config(2, DDP)


def test_where_there_is_no_such_file_there_is_nothing_to_tell(monkeypatch):
    assert stale_default_config(2, DDP) is None
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(default_config_path()) == "/somewhere/huggingface/accelerate/default_config.yaml"
