"""A model as it is built: FSDP2's is that of one process, buffers too, and adapters change no output at first."""

import shutil

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

from sft_play.engines.stored import put_to_use
from sft_play.model.adapters.attach import load_adapter
from sft_play.model.build import build_model
from tests.conftest import VOCABULARY
from tests.jobs import make_job
from tests.plans import plan_with


@pytest.fixture(scope="module")
def gemma(tiny_model, tmp_path_factory):
    """Its embedding is multiplied by the root of the hidden size, which bf16 rounds, in a buffer."""
    folder = tmp_path_factory.mktemp("gemma") / "model"
    shutil.copytree(tiny_model, folder)
    config = Gemma3TextConfig(
        hidden_size=72, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=512,
    )  # fmt: skip
    Gemma3ForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_a_model_to_divide_is_that_of_one_process(request, tmp_path, kind, mode):
    folder = request.getfixturevalue("gemma" if kind == "gemma" else "tiny_model")
    job = make_job(folder, tmp_path, "run", mode=mode)
    alone, divided = (
        build_model(job.config, plan_with(job.plan, dtype="float32", engine=engine))
        for engine in ("none", "fsdp2")
    )
    for parameter in divided.parameters():
        put_to_use(parameter, "cpu")
    found = dict([*divided.named_parameters(), *divided.named_buffers()])
    for name, expected in [*alone.named_parameters(), *alone.named_buffers()]:
        assert found[name].dtype == expected.dtype and torch.equal(found[name], expected), name


@pytest.mark.parametrize("engine", ["none", "fsdp2"])
@pytest.mark.parametrize("init", ["default", "pissa", "olora"])
def test_an_adapter_changes_no_output_before_it_is_trained(tiny_model, tmp_path, init, engine):
    """PiSSA and OLoRA take out of the base what the adapter adds."""
    job = make_job(tiny_model, tmp_path, "run", lora={"init": init})
    adapted = build_model(job.config, plan_with(job.plan, dtype="float32", engine=engine))
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.allclose(adapted(tokens).logits, base(tokens).logits, atol=1e-5)
    inside = adapted.get_base_model().state_dict()
    name = "model.layers.0.self_attn.q_proj"
    same = torch.equal(inside[f"{name}.base_layer.weight"], base.state_dict()[f"{name}.weight"])
    assert same == (init == "default")


def test_adapters_are_loaded_without_the_first_gpu(tiny_model, tmp_path, monkeypatch):
    """Where there are GPUs, PEFT asks safetensors for "cuda", which is the first one on every rank."""
    job = make_job(tiny_model, tmp_path, "run")
    model = build_model(job.config, job.plan)
    model.save_pretrained(tmp_path / "adapter")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # to load from there would fail here
    with torch.no_grad():
        weight = next(each for each in model.parameters() if each.requires_grad)
        saved = weight.clone()
        weight.add_(1)
    model.load_adapter(tmp_path / "adapter", "default", is_trainable=True)
    assert torch.equal(weight, saved)
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    merged = load_adapter(base, tmp_path / "adapter")  # as for a merge, in RAM
    assert torch.equal(next(value for name, value in merged.named_parameters() if "lora_A" in name), saved)


@pytest.mark.parametrize(("engine", "dtype"), [("ddp", torch.float32), ("deepspeed_z2", torch.bfloat16)])
def test_4_bit_layers_compute_in_the_type_that_the_engine_gives_the_model(
    tiny_model, tmp_path, engine, dtype
):
    job = make_job(tiny_model, tmp_path, "run", mode="qlora")
    plan = plan_with(job.plan, dtype="float32", mixed_precision="bf16", engine=engine)
    layers = [each for each in build_model(job.config, plan).modules() if isinstance(each, Linear4bit)]
    assert layers and all(each.compute_dtype == each.weight.quant_state.dtype == dtype for each in layers)
