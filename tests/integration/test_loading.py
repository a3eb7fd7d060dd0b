"""A process of FSDP2 never has more of a model in RAM than its part and one layer, and has the same weights."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from sft_play.model.build import build_model
from sft_play.sizing.meters.cpu import storage_bytes
from sft_play.units import MIB
from tests.conftest import VOCABULARY
from tests.integration.loading import weights_of
from tests.integration.processes import launch_jobs
from tests.jobs import make_job
from tests.plans import plan_with

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]

RANKS, LAYERS = 2, 12  # enough for a model that is whole in fp32 or bf16 to be above what is allowed
HIDDEN, INNER = 512, 1536
LAYER = 4 * HIDDEN * (4 * HIDDEN + 3 * INNER)  # bytes of the matrices of a layer in fp32
# what is loaded from files in fp16, and the type that it is used in
KINDS = {"lora": "bfloat16", "qlora": "bfloat16", "full": "float32"}
# Python's own objects, and pages of the heap that are only partly free
BESIDES = 8 * MIB


@pytest.fixture(scope="module")
def model(tiny_model, tmp_path_factory):
    """LAYERS layers of 3.4 million parameters, and hardly anything else."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("loading") / "model"
    shutil.copytree(tiny_model, folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=8,
        vocab_size=VOCABULARY, max_position_embeddings=512, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).half().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def runs(model, tiny_model):
    """The folder of the runs; the first ones only import what the others need."""
    warm = [{"model": str(tiny_model), "name": f"warm-{kind}", "settings": {"mode": kind}} for kind in KINDS]
    specs = [{"model": str(model), "name": kind, "settings": {"mode": kind}} for kind in KINDS]
    for spec in [*warm, *specs]:
        spec["load_as"] = KINDS[spec["settings"]["mode"]]
    launch_jobs(model.parent, "fsdp2", RANKS, [*warm, *specs], forked=True)
    return model.parent


@pytest.fixture(scope="module", params=list(KINDS))
def whole(request, model, runs):
    """A kind, and the model that one process trains."""
    kind = request.param
    job = make_job(model, runs, f"one-{kind}", mode=kind)
    return kind, build_model(job.config, plan_with(job.plan, dtype=KINDS[kind]))


@pytest.mark.thorough
def test_processes_have_the_parts_of_the_weights_that_one_process_has(whole, runs):
    kind, model = whole
    parts = [load_file(runs / kind / f"parts.{rank}.safetensors") for rank in range(RANKS)]
    for name, expected in weights_of(model).items():
        found = [part[name] for part in parts]
        joined = found[0] if ":" in name else torch.cat(found)
        assert joined.dtype == expected.dtype and torch.equal(joined, expected), name


@pytest.mark.thorough
def test_a_process_holds_no_more_than_its_part_and_a_layer(whole, runs):
    kind, model = whole
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    tables = storage_bytes(model) - parameters
    for rank in range(RANKS):
        peak = json.loads((runs / kind / f"load.{rank}.json").read_text())["peak"]
        assert peak <= parameters / RANKS + tables + LAYER + BESIDES
