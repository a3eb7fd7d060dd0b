import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Phi3Config

from sft_play.commands import export as exporting
from sft_play.commands.export import export
from sft_play.commands.merge import merge
from sft_play.errors import CheckpointError, ConfigError, StorageError
from sft_play.manifest import find_damage
from sft_play.runlog import RunDir
from tests.unit.export import folders
from tests.unit.finished_run import FinishedRun, config_of, random_run

gguf = pytest.importorskip("gguf", reason="needs gguf (pip install gguf)")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    return random_run(folders.make_folder("llama3", folder / "base"), folder, system_prompt="Be brief.")


@pytest.fixture
def finished(trained, tmp_path):
    run = RunDir(tmp_path / "runs" / "order")
    shutil.copytree(trained.run.path, run.path)
    return FinishedRun(trained.config, run)


def embedding(path: Path):
    tensor = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "blk.1.ffn_up.weight")
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)


def test_an_export_merges_first_and_holds_the_merged_weights(finished, capsys):
    result = export(finished.config, finished.run)
    folder = finished.run.path / "gguf"
    files = {"order-F32.gguf", "Modelfile", "export.json", "sft-play-manifest.json"}
    assert {path.name for path in folder.iterdir()} == files and find_damage(folder) is None
    merged = load_file(finished.run.path / "merged" / "model.safetensors")[
        "model.layers.1.mlp.up_proj.weight"
    ]
    base = load_file(Path(finished.config.model.name) / "model.safetensors")[
        "model.layers.1.mlp.up_proj.weight"
    ]
    found = torch.from_numpy(embedding(folder / result["file"]).copy())
    assert torch.equal(found, merged) and (merged - base).abs().max() > 0.01
    text = (folder / "Modelfile").read_text()
    assert "FROM ./order-F32.gguf" in text and 'PARAMETER stop "<|im_end|>"' in text
    assert 'SYSTEM """Be brief."""' in text and '{{ "<|im_start|>system\\n" }}' in text
    said = " ".join(capsys.readouterr().out.split())
    assert "exported: f32, " in said and "order-F32.gguf" in said and "ollama create order -f" in said


def test_a_merge_is_used_again_unless_the_adapter_has_changed(finished, monkeypatch):
    merge(finished.config, finished.run)
    merged = []
    monkeypatch.setattr(exporting, "merge", lambda config, run: merged.append(1))
    export(finished.config, finished.run, dtype="q8_0")
    assert not merged
    file = finished.run.adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\1")
    export(finished.config, finished.run)
    assert merged


def test_full_fine_tuning_is_exported_without_a_merge(tmp_path):
    base = folders.make_folder("gemma2", tmp_path / "base")
    config = config_of(base, tmp_path, "full")
    run = RunDir(tmp_path / "runs" / "order")
    shutil.copytree(base, run.model)
    assert export(config, run, dtype="bf16")["file"] == "order-BF16.gguf"
    assert not (run.path / "merged").exists()


@pytest.mark.parametrize(("task", "added"), [("sft", False), ("cpt", True)])
def test_what_only_texts_begin_with_is_added_if_only_texts_were_trained(tmp_path, capsys, task, added):
    base = folders.make_folder("gemma2", tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = folders.GEMMA.replace("{{ bos_token }}", "")
    tokenizer.save_pretrained(base)
    config = config_of(base, tmp_path, "full", task=task)
    run = RunDir(tmp_path / "runs" / "order")
    shutil.copytree(base, run.model)
    result = export(config, run)
    assert (result["adds_bos"], result["bos_of_texts"]) == (added, None if added else "<bos>")
    said = "the file adds no <bos>" in " ".join(capsys.readouterr().out.split())
    assert said is not added


def unmerged(run) -> bool:
    return not (run.path / "merged").exists() and not (run.path / "gguf").exists()


def test_an_architecture_that_llama_cpp_lacks_is_refused_before_anything_is_merged(finished, monkeypatch):
    monkeypatch.setattr(exporting, "load_model_config", lambda model: Phi3Config())
    with pytest.raises(
        ConfigError, match="models of type phi3 cannot be exported, only those of type llama, mistral, qwen2"
    ):
        export(finished.config, finished.run)
    assert unmerged(finished.run)


def test_a_tokenizer_that_gguf_lacks_is_refused_before_anything_is_merged(tiny_model, tmp_path):
    finished = random_run(tiny_model, tmp_path)
    with pytest.raises(ConfigError, match="tokenizers of type WordLevel cannot be exported; supported: BPE"):
        export(finished.config, finished.run)
    assert unmerged(finished.run)


def test_other_types_are_refused(finished):
    with pytest.raises(ConfigError, match="DTYPE=int4 is not supported; allowed: auto, f32, f16, bf16, q8_0"):
        export(finished.config, finished.run, dtype="int4")
    assert unmerged(finished.run)


def test_without_the_package_the_command_that_installs_it_is_named(finished, monkeypatch):
    monkeypatch.setattr(exporting.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs gguf \(not installed\); run `.*(gguf|export)"):
        export(finished.config, finished.run)


def test_a_run_that_has_not_finished_is_told_so(finished):
    shutil.rmtree(finished.run.adapter)
    with pytest.raises(CheckpointError, match="has no finished adapter"):
        export(finished.config, finished.run)


def test_a_full_disk_leaves_the_earlier_export(finished, monkeypatch):
    export(finished.config, finished.run)
    before = {path.name: path.read_bytes() for path in (finished.run.path / "gguf").iterdir()}

    def full(writer, tensor, *rest):
        writer.fout[0].write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
    with pytest.raises(StorageError, match="cannot write .*gguf: No space left on device"):
        export(finished.config, finished.run, dtype="f16")
    assert {path.name: path.read_bytes() for path in (finished.run.path / "gguf").iterdir()} == before
    assert not list(finished.run.path.glob("*incomplete*"))


def test_too_little_space_is_seen_before_anything_is_written(finished, monkeypatch):
    merge(finished.config, finished.run)
    usage = shutil._ntuple_diskusage(10**6, 10**6 - 1000, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StorageError, match="the GGUF file needs .* free"):
        export(finished.config, finished.run)
    assert not (finished.run.path / "gguf").exists()


def test_a_foreign_folder_is_not_overwritten(finished, tmp_path):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match=r"was not written by `make export`.*OUT=<another folder>"):
        export(finished.config, finished.run, output=foreign)
    assert [path.name for path in foreign.iterdir()] == ["thesis.txt"]


def test_a_template_that_ollama_cannot_have_is_said(finished, monkeypatch, capsys):
    tokenizer = AutoTokenizer.from_pretrained(finished.config.model.name)
    tokenizer.chat_template = "{% for m in messages %}{{ loop.index }} {{ m.content }}<|im_end|>{% endfor %}"
    monkeypatch.setattr(exporting, "load_chat_tokenizer", lambda config: tokenizer)
    result = export(finished.config, finished.run)
    assert not result["template"] and "has no TEMPLATE" in " ".join(capsys.readouterr().out.split())


def test_a_merged_folder_has_all_that_transformers_and_vllm_read(finished):
    merge(finished.config, finished.run, max_shard_bytes=100_000)
    folder = finished.run.path / "merged"
    names = {path.name for path in folder.iterdir()}
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
        *index.values(),
    } <= names  # fmt: skip
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == "float32"
    assert not any(name.endswith((".bin", ".pt", ".py")) for name in names)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == folders.CHATML
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    stored = set(index)
    expected = set(model.state_dict()) - {"lm_head.weight"}  # tied
    assert stored == expected and end in GenerationConfig.from_pretrained(folder).eos_token_id
