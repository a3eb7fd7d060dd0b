"""What merge, merge-test and export hold of a model in RAM: a part of it, however large it is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sft_play.config.schema import RunConfig
from sft_play.model.adapters.attach import attach_adapter
from sft_play.model.build import load_base
from sft_play.model.weights.merged import FP32_COPIES
from sft_play.runlog import RunDir
from sft_play.units import MIB
from tests.unit.export.folders import SIZES, byte_tokenizer
from tests.unit.finished_run import question_rows, write_rows

pytestmark = [pytest.mark.integration, pytest.mark.slow]

LAYERS, HIDDEN, INNER = 16, 1024, 2048
MATRIX = 4 * HIDDEN * INNER  # bytes of the largest one in fp32
FILE = {"max_shard_bytes": 16 * MIB}
BESIDES = 20 * MIB  # what libraries keep from their first use on, and pages of the heap that are partly free
COMMANDS = {
    "merge to float32": {"what": "merge", "dtype": "float32"} | FILE,
    "merge": {"what": "merge"} | FILE,
    "export": {"what": "export", "dtype": "f16"},
    "merge_test": {"what": "merge_test"},
}


def make_run(base: Path, folder: Path) -> dict:
    """The config of a run on the base with an adapter that changes every layer."""
    data = str(write_rows(folder / "rows.jsonl", question_rows()))
    config = {
        "model": {"name": str(base)},
        "data": {"train_path": data, "val_path": data, "num_workers": 1},
        "output": {"name": base.name, "dir": str(folder / "runs")},
    }
    settings = RunConfig.model_validate(config)
    model = load_base(
        settings.model, dtype="bfloat16", attn_implementation="eager", device=torch.device("cpu"),
        quantize=False,
    )  # fmt: skip
    adapted = attach_adapter(model, settings.tuning.lora)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    adapted.save_pretrained(RunDir(folder / "runs" / base.name).adapter)
    return config


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Configs of two runs: of a tiny model, and of a larger one, both in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("after")
    large = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
    made = []
    for name, sizes in (("tiny", SIZES), ("large", SIZES | large)):
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16().save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
        made.append(make_run(folder / name, folder))
    return made


@pytest.fixture(scope="module")
def found(runs, tmp_path_factory):
    """What each command took on the large model; on the tiny one it only imports what it needs."""
    specs = [{"config": config, **command} for config in runs for command in COMMANDS.values()]
    file = tmp_path_factory.mktemp("found") / "specs.json"
    file.write_text(json.dumps(specs))
    script = Path(__file__).with_name("after_training.py")
    subprocess.run([sys.executable, script, file], check=True)
    measured = json.loads(file.with_suffix(".found").read_text())
    return dict(zip(COMMANDS, measured[len(COMMANDS) :], strict=True))


@pytest.fixture(scope="module")
def sizes(runs):
    """Bytes of the large model and of its adapter."""
    folders = Path(runs[1]["model"]["name"]), Path(runs[1]["output"]["dir"]) / "large" / "adapter"
    return [sum(file.stat().st_size for file in folder.glob("*.safetensors")) for folder in folders]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_holds_a_file_the_adapter_and_copies_of_a_matrix(found, sizes, name):
    model, adapter = sizes
    written = COMMANDS[name].get("max_shard_bytes", 0)
    bound = written + adapter + FP32_COPIES * MATRIX + BESIDES
    print(name, found[name]["peak"] / MIB, bound / MIB)
    assert found[name]["peak"] <= bound < model / 3


@pytest.mark.parametrize("name", ["merge", "merge to float32"])
def test_a_merge_says_what_ram_it_needs(found, sizes, name):
    model, _ = sizes
    took = found[name]["before"] + found[name]["peak"]
    assert took - BESIDES <= found[name]["said"] < found[name]["before"] + model / 3
