import json
import shutil

import bitsandbytes
import pytest
import torch
from bitsandbytes.nn import Linear4bit
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
)

from benchmarks.miniatures import miniature
from benchmarks.small_models import WIDE, small_config
from sft_play.config.schema import LoraSettings, ModelConfig
from sft_play.errors import ConfigError
from sft_play.model.adapters.attach import attach_adapter
from sft_play.model.architecture.shape import without_weights
from sft_play.model.attention import varlen
from sft_play.model.build import freeze_what_gets_no_gradient, load_base
from sft_play.model.layers.cpu import keep_differentiable
from sft_play.model.load import hub_arguments, load_model_config, load_tokenizer, not_loadable
from sft_play.sizing.step import StepSpec
from sft_play.sizing.trace.fake_model import skeleton
from tests.rounding import assert_same_tensor, step_terms, summed

CPU = torch.device("cpu")


def base(folder, quantize=False):
    return load_base(
        ModelConfig(name=str(folder)),
        dtype="float32",
        attn_implementation=varlen.NAME,
        device=CPU,
        quantize=quantize,
    )


def trainable(model) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def test_lora_trains_an_fp32_adapter_on_every_linear_layer_but_the_head(tiny_model):
    model = attach_adapter(base(tiny_model), LoraSettings(r=4))
    names = trainable(model)
    assert len(names) == 2 * 2 * 7  # 2 layers, A and B, seven linear layers
    assert all("lora_" in name and "lm_head" not in name for name in names)
    assert {parameter.dtype for parameter in model.parameters() if parameter.requires_grad} == {torch.float32}


def test_under_autocast_the_adapter_keeps_fewer_bytes_and_has_the_same_gradients(tiny_model):
    ids = torch.arange(1, 65)[None]
    kept, gradients = [], []
    for autocast in (False, True):
        torch.manual_seed(1)
        model = base(tiny_model).to(torch.bfloat16)
        lora = LoraSettings(r=4, dropout=0.1)  # without it, there is one path for both
        model = attach_adapter(model, lora, autocast=autocast).eval()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
        saved: dict[int, int] = {}

        def remember(tensor, saved=saved):
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            kept.append(sum(saved.values()))
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.requires_grad])
    assert kept[1] < 0.95 * kept[0]
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_dora_computes_its_norms_in_fp32_under_autocast_too(tiny_model):
    model = attach_adapter(base(tiny_model), LoraSettings(r=4, use_dora=True), autocast=True)
    assert all(getattr(module, "cast_input_dtype_enabled", True) for module in model.modules())


def test_of_gemma_3n_the_text_part_is_loaded_without_the_package_of_its_vision_tower(tmp_path):
    config, inside = miniature("gemma3n"), "model.language_model."
    text = AutoModelForCausalLM.from_config(config.text_config)
    weights = {
        name.replace("model.", inside, 1): each for name, each in text.model.named_parameters(prefix="model")
    }
    save_file(weights | {"model.vision_tower.conv.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    config.save_pretrained(tmp_path)
    load_model_config(ModelConfig(name=str(tmp_path)))

    loaded = base(tmp_path)

    assert type(loaded) is type(text)
    assert all(
        torch.equal(one, other) for one, other in zip(loaded.parameters(), text.parameters(), strict=True)
    )


def test_qlora_holds_the_base_in_four_bits(tiny_model):
    model = attach_adapter(base(tiny_model, quantize=True), LoraSettings(r=4))
    packed = [module.weight for module in model.modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]
    assert len(packed) == 14 and all(weight.dtype == torch.uint8 for weight in packed)


def test_a_four_bit_model_has_the_same_gradients_after_an_evaluation(tiny_model):
    model = base(tiny_model, quantize=True)
    ids = torch.arange(6)[None]

    def gradient() -> torch.Tensor:
        embedding = model.get_input_embeddings().weight.requires_grad_(True)
        embedding.grad = None
        model.train()
        model(input_ids=ids, labels=ids).loss.backward()
        return embedding.grad

    before = gradient()
    with torch.no_grad():
        model.eval()(input_ids=ids)
    assert before.abs().sum() > 0
    assert_same_tensor(gradient(), before, summed(step_terms(base(tiny_model), tokens=6)))


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize(
    ("setting", "kind"), [("use_dora", "lora_magnitude_vector"), ("use_rslora", "lora_A")]
)
def test_variants_of_lora_attach(tiny_model, setting, kind, quantize):
    model = attach_adapter(base(tiny_model, quantize), LoraSettings(r=4, alpha=8, **{setting: True}))
    assert any(kind in name for name in trainable(model))
    layer = next(module for module in model.modules() if isinstance(getattr(module, "scaling", None), dict))
    assert layer.scaling["default"] == pytest.approx(8 / 4**0.5 if setting == "use_rslora" else 8 / 4)


def test_target_modules_that_match_nothing_list_those_that_exist(tiny_model):
    with pytest.raises(ConfigError, match=r"(?s)nonsense.*down_proj, gate_proj, k_proj"):
        attach_adapter(base(tiny_model), LoraSettings(target_modules=["nonsense"]))


def test_a_target_that_cannot_be_adapted_is_named(tiny_model):
    with pytest.raises(ConfigError, match=r"(?s)target_modules=.*LlamaMLP.*not supported.*: down_proj, gate"):
        attach_adapter(base(tiny_model), LoraSettings(target_modules=["mlp"]))


def test_an_error_of_a_library_that_is_not_about_targets_stays_what_it_is():
    """DoRA reads the weights, which a 4-bit layer without any does not have."""
    spec = StepSpec(mode="qlora")
    empty, _ = skeleton(small_config("llama", WIDE), spec, all_layers=True)
    with pytest.raises(ValueError, match="^dequantize_4bit requires"), without_weights():
        attach_adapter(empty, LoraSettings(use_dora=True))


@pytest.mark.parametrize("asked", [["q_proj", "nope"], ["self_attn.q_proj", "v_proj", "layers.7.v_proj"]])
def test_each_target_module_is_there_or_refused(tiny_model, asked):
    with pytest.raises(
        ConfigError, match=rf"(?s)nothing is named {asked[-1]}\nlinear.*: down_proj, gate_proj"
    ):
        attach_adapter(base(tiny_model), LoraSettings(target_modules=asked))
    found = attach_adapter(base(tiny_model), LoraSettings(target_modules=asked[:-1]))
    assert len(found.base_model.targeted_module_names) == len(asked[:-1]) * len(
        found.base_model.model.model.layers
    )


@pytest.mark.parametrize(
    "text",
    ['{"eos_token_id": 2', "[1]", '{"eos_token_id": "abc"}', '{"eos_token_id": [1, "x"]}', '{"eos_token_id": -5}',
     '{"max_new_tokens": -5}', '{"watermarking_config": 5}'],
)  # fmt: skip
def test_a_broken_generation_config_is_named(tiny_model, tmp_path, text):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(
        ConfigError, match=r"^model.name: .*generation_config.json.*copy the file again"
    ) as found:
        load_model_config(ModelConfig(name=str(folder)))
    assert "\n" not in str(found.value)


def test_a_weight_that_was_split_while_loading_does_not_keep_the_whole(tmp_path):
    """The vision tower of Kimi K2.5 is saved with query, key and value in one tensor."""
    AutoModelForImageTextToText.from_config(miniature("kimi_k25")).save_pretrained(tmp_path)
    load_model_config(ModelConfig(name=str(tmp_path)))
    loaded = base(tmp_path)
    assert {each.untyped_storage().nbytes() - each.nbytes for each in loaded.parameters()} == {0}


def test_a_model_that_also_sees_trains_only_the_part_that_reads(tmp_path):
    text = dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=64,
    )
    vision = dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=60)
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    model = base(tmp_path)
    freeze_what_gets_no_gradient(model)
    assert trainable(model) and not [
        name for name in trainable(model) if "vision" in name or "multi_modal" in name
    ]
    names = trainable(attach_adapter(base(tmp_path), LoraSettings()))
    assert len(names) == 2 * 2 * 7 and all("language_model" in name for name in names)


def test_full_tuning_leaves_out_what_only_chooses_tokens():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(miniature("deepseek_v32"))

    freeze_what_gets_no_gradient(model)
    ids = torch.arange(7, 39)[None]
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained < {name for name, _ in model.named_parameters()}


def test_a_switch_of_4_bit_layers_that_is_gone_is_named():
    layer = Linear4bit(2, 2, device="meta")
    keep_differentiable(layer)
    assert layer.support_avx512bf16_for_cpu is False
    del layer.support_avx512bf16_for_cpu
    with pytest.raises(ConfigError, match="support_avx512bf16_for_cpu.*make install"):
        keep_differentiable(layer)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", "has no .*safetensors weights"),
        ("tokenizer.json", "tokenizer"),
    ],
)
def test_a_model_folder_that_lacks_a_part_says_which(tiny_model, tmp_path, missing, message):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / missing).unlink()
    with pytest.raises(ConfigError, match=message):
        load_model_config(ModelConfig(name=str(folder)))
        load_tokenizer(ModelConfig(name=str(folder)))
        base(folder)


def test_pickled_weights_are_not_loaded(tiny_model, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "model.safetensors").unlink()
    canary = tmp_path / "ran"

    class Payload:
        def __reduce__(self):
            return (canary.touch, ())

    torch.save({"payload": Payload()}, folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="safetensors"):
        base(folder)
    assert not canary.exists()


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize("revision", [None, "main", "v1.0", COMMIT[:12], COMMIT.upper()])
@pytest.mark.parametrize("load", [load_model_config, load_tokenizer])
def test_code_of_the_hub_is_only_run_at_a_pinned_commit(load, revision):
    model = ModelConfig(name="someone/model", trust_remote_code=True, revision=revision)
    with pytest.raises(ConfigError, match="set model.revision to the full id .*someone/model/commits"):
        load(model)


def own_code(folder, reference, name="config.json"):
    """A model folder that names a class of its own, which leaves a mark when its module runs."""
    tree = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
    model_type = {"model_type": "own"} if name == "config.json" else {}
    (folder / name).write_text(json.dumps(tree | model_type | {"auto_map": reference}))
    (folder / "own.py").write_text(
        f"open({str(folder / 'ran')!r}, 'w')\nfrom transformers import LlamaConfig\n\n\n"
        "class OwnConfig(LlamaConfig):\n    pass\n"
    )
    return folder


def test_code_in_a_folder_runs_if_it_is_trusted(tiny_model, tmp_path):
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    folder = own_code(shutil.copytree(tiny_model, tmp_path / "model"), names)
    with pytest.raises(ConfigError, match="trust_remote_code=true"):
        load_model_config(ModelConfig(name=str(folder)))
    assert not (folder / "ran").exists()
    assert load_model_config(ModelConfig(name=str(folder), trust_remote_code=True)).hidden_size == 64
    assert (folder / "ran").exists()


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ({"AutoConfig": "other/repository--own.OwnConfig"}, "config.json"),
        ({"AutoTokenizer": ["other/repository--own.Slow", None]}, "tokenizer_config.json"),
    ],
)
def test_a_folder_cannot_bring_in_unpinned_code_from_elsewhere(tiny_model, tmp_path, reference, name):
    folder = own_code(shutil.copytree(tiny_model, tmp_path / "model"), reference, name)
    with pytest.raises(ConfigError, match="Python code of 'other/repository' here, and model.revision=null"):
        load_model_config(ModelConfig(name=str(folder), trust_remote_code=True))


def test_code_from_elsewhere_is_asked_for_at_the_pinned_commit():
    arguments = hub_arguments(ModelConfig(name="someone/model", trust_remote_code=True, revision=COMMIT))
    assert arguments["revision"] == arguments["code_revision"] == COMMIT
    assert "code_revision" not in hub_arguments(ModelConfig(name="someone/model"))


def test_a_gated_model_says_how_to_get_access():
    error = OSError("You are trying to access a gated repo.\nMake sure to have access to it at ...")
    said = str(not_loadable("config", ModelConfig(name="org/gated"), error))
    assert (
        "accept the license at https://huggingface.co/org/gated, then run `.venv/bin/hf auth login`" in said
    )


def test_a_model_of_a_hub_that_cannot_be_reached_is_not_called_a_wrong_name():
    error = OSError(
        "We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them"
    )
    said = str(not_loadable("config", ModelConfig(name="Qwen/Qwen3-0.6B"), error))
    assert (
        "the Hub is not reachable, and it is not in the local cache\nuse a local folder, or connect" in said
    )


@pytest.mark.parametrize("typed", ["qwen3-8b", "Qwen/Qwen3-8", "qwen/qwen3-8b"])
def test_a_misspelt_model_is_recognized(typed):
    said = str(not_loadable("config", ModelConfig(name=typed), OSError("not found")))
    assert said.endswith("did you mean model.name=Qwen/Qwen3-8B?")


def test_a_folder_that_is_not_there_is_no_matter_of_repo_ids():
    with pytest.raises(ConfigError, match="neither a folder here nor a name on the Hub"):
        load_model_config(ModelConfig(name="./nowhere/model"))
