import dataclasses
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from sft_play.commands import merge as merging
from sft_play.commands.chat import chat
from sft_play.commands.evaluate import evaluate_run
from sft_play.commands.infer import infer_batch
from sft_play.commands.merge import TOLERANCES, compare_logits, failures, merge, merge_test
from sft_play.commands.output import replacing_output
from sft_play.config.schema import ModelConfig
from sft_play.errors import CheckpointError, ConfigError, NonFiniteError, RunInUseError, StorageError
from sft_play.manifest import files_in, find_damage, hash_files, write_manifest
from sft_play.report.tables import LogitDifference
from sft_play.runlog import RunDir
from tests.rounding import assert_same_tensor, forward_terms, summed
from tests.unit.finished_run import FinishedRun, make_config, train_by_heart


@pytest.fixture(scope="module")
def trained(tiny_model, tmp_path_factory):
    return train_by_heart(make_config(tiny_model, tmp_path_factory.mktemp("merge")))


@pytest.fixture
def finished(trained, tmp_path):
    """A copy of the run, to be spoilt."""
    run = RunDir(tmp_path / "runs" / "lora")
    shutil.copytree(trained.run.path, run.path)
    return FinishedRun(trained.config, run)


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 60)[None]).logits


def change_adapter(run, change):
    """Rewrites each adapter weight."""
    file = run.adapter / "adapter_model.safetensors"
    save_file(
        {name: change(name, tensor) for name, tensor in load_file(file).items()},
        file,
        metadata={"format": "pt"},
    )


def test_a_merged_model_stands_alone_and_gives_the_adapter_models_logits(finished):
    result = merge(finished.config, finished.run)
    merged = AutoModelForCausalLM.from_pretrained(finished.run.path / "merged")
    base = AutoModelForCausalLM.from_pretrained(finished.config.model.name)
    with_adapter = PeftModel.from_pretrained(base, finished.run.adapter)
    assert type(merged).__name__ == "LlamaForCausalLM"
    assert_same_tensor(logits(merged), logits(with_adapter), summed(forward_terms(with_adapter, tokens=57)))
    assert result["dtype"] == "float32"
    assert merge_test(finished.config, finished.run)["passed"]


def test_a_base_that_comes_with_sft_play_is_called_as_a_person_calls_it(finished, tiny_model, tmp_path):
    kept = shutil.copytree(tiny_model, tmp_path / "builtin" / f"tiny-{24 * '0'}")
    result = merge(finished.config.changed({"model.name": str(kept)}), finished.run)
    written = json.loads((finished.run.merged / "merge.json").read_text())
    assert result["base"] == written["base"] == "builtin:tiny"


def test_two_commands_do_not_write_into_one_folder(tmp_path):
    output = tmp_path / "merged"
    with replacing_output(output) as folder:
        (folder / "weights").write_text("")
        refused = pytest.raises(RunInUseError, match="another process is writing .*merged; wait for it")
        with refused, replacing_output(output):
            pass
        assert (folder / "weights").is_file()
    assert list(tmp_path.iterdir()) == [output] and (output / "weights").is_file()


def test_an_adapter_that_was_trained_with_other_tokens_is_refused(finished):
    folder = finished.run.adapter
    write_manifest(folder, {"new_tokens": ["<tool>"]}, hash_files(folder, files_in(folder)))
    with pytest.raises(CheckpointError, match=r"new_tokens=\['<tool>'\], and the config has \[\]; use"):
        merge(finished.config, finished.run)


def test_tokenizer_template_and_stop_tokens_go_along(finished, tiny_model):
    merge(finished.config, finished.run)
    folder = finished.run.path / "merged"
    assert (
        AutoTokenizer.from_pretrained(folder).chat_template
        == AutoTokenizer.from_pretrained(tiny_model).chat_template
    )
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_dtype_can_be_chosen_and_passes_its_own_tolerance(finished, dtype):
    merge(finished.config, finished.run, dtype=dtype)
    weights = load_file(finished.run.path / "merged" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {getattr(torch, dtype)}
    result = merge_test(finished.config, finished.run)
    assert result["tolerance"] == dataclasses.asdict(TOLERANCES[dtype])
    assert (
        0 < result["merged"]["relative_mean"] < result["tolerance"]["mean"] < result["base"]["relative_mean"]
    )


def test_large_models_are_saved_in_shards_with_an_index(finished):
    result = merge(finished.config, finished.run, max_shard_bytes=100_000)
    folder = finished.run.path / "merged"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert result["files"] == len(set(index["weight_map"].values())) > 1
    assert merge_test(finished.config, finished.run)["passed"]


def test_the_test_fails_when_the_adapter_is_not_in_the_merged_model(finished):
    merge(finished.config, finished.run)
    shutil.copy(Path(finished.config.model.name) / "model.safetensors", finished.run.path / "merged")
    seal(finished.run.path / "merged")
    with pytest.raises(CheckpointError, match="does not match the adapter model: the mean difference"):
        merge_test(finished.config, finished.run)


def test_the_test_refuses_a_model_that_was_merged_from_an_earlier_adapter(finished):
    merge(finished.config, finished.run)
    change_adapter(finished.run, lambda name, tensor: tensor * 1.5)
    with pytest.raises(CheckpointError, match="merged from another version of .*make merge"):
        merge_test(finished.config, finished.run)


def test_the_test_without_a_merged_model_names_the_command(finished):
    with pytest.raises(CheckpointError, match="has no merged model yet; run `make merge RUN=.*` first"):
        merge_test(finished.config, finished.run)
    with pytest.raises(CheckpointError, match="there has no .*; run `make merge RUN=.* OUT=there` first"):
        merge_test(finished.config, finished.run, Path("there"))


def test_an_earlier_merge_is_replaced_and_a_foreign_folder_is_not(finished, tmp_path):
    merge(finished.config, finished.run, dtype="float16")
    assert merge(finished.config, finished.run)["dtype"] == "float32"
    wanted = finished.config.output.model_copy(update={"dtype": "bfloat16"})
    assert merge(finished.config.model_copy(update={"output": wanted}), finished.run)["dtype"] == "bfloat16"
    assert sorted(path.name for path in finished.run.path.iterdir()) == ["adapter", "log.txt", "merged"]
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match=r"was not written by `make merge`.*OUT=<another folder>"):
        merge(finished.config, finished.run, foreign)
    assert [path.name for path in foreign.iterdir()] == ["thesis.txt"]


def test_a_merge_that_fails_half_way_leaves_the_earlier_one(finished, monkeypatch):
    merge(finished.config, finished.run)
    before = (finished.run.path / "merged" / "model.safetensors").read_bytes()

    def full_disk(self, folder, **kwargs):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.LlamaForCausalLM.save_pretrained", full_disk)
    with pytest.raises(StorageError, match="No space left on device"):
        merge(finished.config, finished.run)
    assert (finished.run.path / "merged" / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in finished.run.path.iterdir()) == ["adapter", "log.txt", "merged"]


def test_a_file_whose_end_was_lost_is_seen_and_nothing_is_left(finished, monkeypatch):
    save = PreTrainedModel.save_pretrained

    def cut(model, folder, **settings):
        save(model, folder, **settings)
        os.truncate(Path(folder) / "model.safetensors", 10_000)

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", cut)
    before = sorted(finished.run.path.iterdir())
    with pytest.raises(StorageError, match="model.safetensors was not written completely"):
        merge(finished.config, finished.run)
    assert [path for path in finished.run.path.iterdir() if path not in before] == [finished.run.log]


def test_too_little_space_is_seen_before_anything_is_written(finished, monkeypatch):
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 1000, 1000)
    )
    with pytest.raises(StorageError, match="the merged model needs .* free"):
        merge(finished.config, finished.run)
    assert not (finished.run.path / "merged").exists()


def test_weights_that_are_not_finite_are_never_saved(finished):
    change_adapter(finished.run, lambda name, tensor: torch.full_like(tensor, math.nan))
    with pytest.raises(NonFiniteError, match="cannot be merged"):
        merge(finished.config, finished.run)
    assert not (finished.run.path / "merged").exists()


def test_weights_beyond_float16_are_named_with_the_dtypes_that_hold_them(finished):
    change_adapter(finished.run, lambda name, tensor: torch.full_like(tensor, 200.0))
    with pytest.raises(NonFiniteError, match=r"weight .* overflows float16; use DTYPE=bfloat16"):
        merge(finished.config, finished.run, dtype="float16")


def damaged(run, how):
    file = run.adapter / "adapter_model.safetensors"
    if how == "missing":
        file.unlink()
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif how == "empty":
        file.write_bytes(b"")
    elif how == "pickled":
        file.rename(run.adapter / "adapter_model.bin")
    elif how == "foreign":
        (run.adapter / "model.safetensors.index.json").write_text('{"weight_map": {"w": "../x.bin"}}')
    elif how == "no settings":
        (run.adapter / "adapter_config.json").unlink()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", r"has no \*\.safetensors weights \(found: .*adapter_config\.json"),
        ("cut", "is damaged or incomplete"),
        ("empty", "is damaged or incomplete"),
        ("pickled", r"has no \*\.safetensors weights \(found: .*adapter_model\.bin"),
        ("foreign", r"is damaged: .* lists '../x.bin', no \*\.safetensors beside it"),
        ("no settings", "has no finished adapter"),
    ],
)
def test_a_damaged_adapter_is_seen_before_a_model_is_loaded(finished, monkeypatch, how, message):
    damaged(finished.run, how)
    monkeypatch.setattr(merging, "load_base", None)
    with pytest.raises(CheckpointError, match=message) as raised:
        merge(finished.config, finished.run)
    assert raised.value.exit_code == 8
    assert "make resume" in str(raised.value)


def seal(folder):
    write_manifest(folder, {}, hash_files(folder, files_in(folder)))


def flip_bit(file):
    content = bytearray(file.read_bytes())
    content[-9] ^= 1  # in the last weight: the file stays readable
    file.write_bytes(content)


@pytest.mark.parametrize(
    "use",
    [
        lambda config, run: merge(config, run),
        lambda config, run: merge_test(config, run),
        lambda config, run: evaluate_run(config, run),
        lambda config, run: infer_batch(config, run, run.path / "in.jsonl", run.path / "out.jsonl"),
        lambda config, run: chat(config, run),
    ],
    ids=["merge", "merge-test", "eval", "infer", "chat"],
)
def test_an_adapter_with_a_flipped_bit_is_not_used(finished, use):
    seal(finished.run.adapter)
    flip_bit(finished.run.adapter / "adapter_model.safetensors")
    with pytest.raises(
        CheckpointError, match="adapter_model.safetensors has changed since .*\n.*make resume"
    ):
        use(finished.config, finished.run)


def test_a_merged_model_with_a_flipped_bit_is_neither_tested_nor_a_base(finished):
    merge(finished.config, finished.run)
    merged = finished.run.path / "merged"
    assert find_damage(merged) is None
    flip_bit(merged / "model.safetensors")
    with pytest.raises(CheckpointError, match="model.safetensors has changed .*\n.*make merge.* again"):
        merge_test(finished.config, finished.run)
    with pytest.raises(ConfigError, match="model.name: .*merged is damaged: model.safetensors has changed"):
        merging.load_base(
            ModelConfig(name=str(merged)),
            dtype="float32",
            attn_implementation="sdpa",
            device=torch.device("cpu"),
            quantize=False,
        )


def test_after_full_fine_tuning_there_is_nothing_to_merge(tiny_model, tmp_path):
    config = make_config(tiny_model, tmp_path, "full")
    with pytest.raises(ConfigError, match="nothing to merge: tuning.mode=full"):
        merge(config, RunDir(tmp_path))


@pytest.mark.thorough
def test_after_qlora_the_adapter_goes_into_the_unquantized_base(tiny_model, tmp_path):
    pytest.importorskip("bitsandbytes")
    finished = train_by_heart(make_config(tiny_model, tmp_path, "qlora"))
    merge(finished.config, finished.run)
    folder = finished.run.path / "merged"
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    base = AutoModelForCausalLM.from_pretrained(finished.config.model.name)
    with_adapter = PeftModel.from_pretrained(base, finished.run.adapter)
    merged = AutoModelForCausalLM.from_pretrained(folder)
    assert_same_tensor(logits(merged), logits(with_adapter), summed(forward_terms(with_adapter, tokens=57)))
    result = merge_test(finished.config, finished.run)
    assert result["passed"]
    assert result["merged"]["mean_abs"] < result["adapter_on_4bit"]["mean_abs"] < result["base"]["mean_abs"]


def test_logit_differences_are_taken_over_all_positions_of_all_rows():
    reference = torch.tensor([[0.0, 2.0], [4.0, 2.0], [1.0, 3.0]])
    found = compare_logits(reference, torch.tensor([[0.0, 2.0], [1.0, 2.0], [1.0, 2.0]]))
    deviation = reference.std(correction=0).item()
    assert (found.max_abs, found.mean_abs, found.top1, found.positions) == (3.0, 4 / 6, 2 / 3, 3)
    assert found.relative_mean == pytest.approx(4 / 6 / deviation)


def difference(mean, top1=1.0):
    return LogitDifference(mean, mean, mean, top1, 100)


@pytest.mark.parametrize(
    ("merged", "base", "words"),
    [
        (difference(1e-6), difference(1e-1), []),
        (difference(1e-3), difference(1e-1), ["of the standard deviation of the logits"]),
        (difference(math.nan), difference(1e-1), ["of the standard deviation of the logits"]),
        (difference(1e-6, top1=0.9), difference(1e-1), ["the top-1 token agrees"]),
        (difference(1e-6), difference(1.5e-6), ["more than half of what the adapter changes"]),
        (difference(0.0), difference(0.0), []),  # an adapter that changes nothing, merged without a trace
    ],
)
def test_what_counts_as_another_model(merged, base, words):
    found = failures({"merged": merged, "base": base}, TOLERANCES["float32"])
    assert len(found) == len(words)
    assert all(word in line for word, line in zip(words, found, strict=True))
