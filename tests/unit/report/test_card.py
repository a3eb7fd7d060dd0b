"""The model card says what a run was, in the hub's format, and nothing about the machine's folders."""

import re

import pytest
import yaml

from sft_play.config.schema import RopeScaling, RunConfig
from sft_play.report.card import is_on_hub, model_card, public_name

SUMMARY = {
    "device": "cpu",
    "world_size": 2,
    "micro_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "effective_batch_size": 16,
    "optimizer_steps": 40,
    "tokens_per_second": 1234.5,
    "training_seconds": 90.0,
    "predicted_step_seconds": 2.0,
    "measured_step_seconds": 2.5,
    "eval": {"before": {"loss": 2.0}, "after": {"loss": 1.0, "exact_match": 0.5}},
    "data": {
        "fingerprint": "abc123",
        "train": {"rows": 1000, "tokens": 50_000, "supervised_tokens": 20_000},
        "val": None,
        "test": None,
    },
    "versions": {"torch": "2.13.0"},
}


def config(
    name: str = "Qwen/Qwen3-0.6B", mode: str = "lora", path: str = "/home/ann/secret/rows.jsonl"
) -> RunConfig:
    return RunConfig.model_validate(
        {"model": {"name": name}, "data": {"train_path": path}, "tuning": {"mode": mode}}
    )


def front_matter(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


def test_the_hub_finds_base_library_and_tags():
    assert front_matter(model_card(config(), SUMMARY)) == {
        "base_model": "Qwen/Qwen3-0.6B",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["sft", "sft-play", "lora"],
    }


@pytest.mark.parametrize(
    ("mode", "merged", "library", "loader"),
    [
        ("lora", False, "peft", "AutoPeftModelForCausalLM"),
        ("lora", True, "transformers", "AutoModelForCausalLM"),
        ("full", False, "transformers", "AutoModelForCausalLM"),
    ],
)
def test_it_is_loaded_with_the_library_that_can(mode, merged, library, loader):
    card = model_card(config(mode=mode), SUMMARY, merged=merged)
    assert front_matter(card)["library_name"] == library and f"from {library} import {loader}" in card


@pytest.mark.parametrize(
    ("mode", "lines"),
    [
        (
            "lora",
            [
                "from transformers import AutoTokenizer, Gemma3nForCausalLM",
                'base = Gemma3nForCausalLM.from_pretrained("Qwen/Qwen3-0.6B", dtype="auto")',
                "model = PeftModel.from_pretrained(base, folder)",
            ],
        ),
        ("full", ['model = Gemma3nForCausalLM.from_pretrained(folder, dtype="auto")']),
    ],
)
def test_a_model_that_auto_classes_would_load_otherwise_is_loaded_with_its_class(mode, lines):
    card = model_card(config(mode=mode), SUMMARY | {"model_class": "Gemma3nForCausalLM"})
    assert set(lines) <= set(card.splitlines()) and "AutoModelForCausalLM" not in card
    assert "AutoPeftModel" not in card


def test_folders_of_the_machine_are_left_out():
    card = model_card(config("/home/ann/models/base"), SUMMARY)
    assert "/home" not in card and "`base`" in card and "`rows.jsonl`" in card
    assert "base_model" not in front_matter(card) and "datasets" not in front_matter(card)


def test_built_in_models_and_data_have_the_names_that_they_are_asked_for_by():
    cache, key = "/home/ann/.cache/sft-play/builtin", "0123456789abcdef01234567"
    card = model_card(config(f"{cache}/tiny-{key}", path=f"{cache}/demo-data-{key}/train.jsonl"), SUMMARY)
    assert "A LoRA adapter for `builtin:tiny`, trained on `builtin:demo`" in card and key not in card
    assert public_name(f"{cache}/demo-model-{key}") == "builtin:demo"
    assert public_name(f"/home/ann/tiny-{key}") == f"tiny-{key}"


def test_scores_data_and_measurements_are_those_of_the_summary():
    card = model_card(config(), SUMMARY)
    for line in (
        "| loss | 2.0000 | 1.0000 |",
        "| perplexity | 7.39 | 2.72 |",
        "| exact match | n/a | 50.0% |",
        "| train | 1,000 | 50,000 | 20,000 |",
        "| plan | micro-batch 8 x accumulation 1 x 2 processes = 16 sequences |",
        "| trained on | 40 steps, n/a supervised tokens |",
        "| step | predicted 2.0 s, measured 2.5 s (prediction 20% too low) |",
    ):
        assert line in card.splitlines()
    assert "torch 2.13.0" in card and "abc123" in card


def test_the_scores_of_each_model_on_each_evaluated_split_are_in_a_table_of_their_own():
    models = {"base": {"loss": 2.0}, "adapter": {"loss": 1.0, "exact_match": 0.5}}
    card = model_card(config(), {}, {"val": {}, "test": models})
    assert "`make eval` on the test split:\n\n| metric | base | adapter |" in card
    assert "| loss | 2.0000 | 1.0000 |\n| exact match | n/a | 50.0% |" in card and "val split" not in card


def test_without_results_their_sections_are_left_out():
    card = model_card(config(), {})
    assert not re.search("## (Scores|Data|Versions)", card) and "## Settings" in card


def test_a_cell_cannot_break_the_table():
    settings = config().model_dump() | {"tuning": {"lora": {"target_modules": ["q|proj"]}}}
    assert "| adapted modules | q&#124;proj |" in model_card(RunConfig.model_validate(settings), SUMMARY)


def test_a_folder_is_not_a_hub_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_on_hub("models/base") and not is_on_hub("base") and not is_on_hub("/models/base")
    (tmp_path / "models" / "base").mkdir(parents=True)
    assert not is_on_hub("models/base")


def test_an_adapter_with_scaled_positions_says_so_and_a_merged_model_need_not():
    run = config()
    scaled = RopeScaling(rope_type="yarn", factor=4)
    run = run.model_copy(update={"model": run.model.model_copy(update={"rope_scaling": scaled})})
    assert "trained with scaled positions (rope_type: yarn, factor: 4)" in model_card(run, {})
    assert "scaled positions" not in model_card(run, {}, merged=True) + model_card(config(), {})


def test_the_card_of_an_adapter_says_where_a_server_must_stop():
    summary = SUMMARY | {"stop_tokens": {"<|im_end|>": 151645}}
    card = model_card(config(), summary)
    assert "end with `<|im_end|>` (token 151645), where the base does not stop" in card
    assert '`"stop_token_ids": [151645]`' in card
    assert "max_new_tokens=256, eos_token_id=[tokenizer.eos_token_id, 151645])" in card
    for other in (model_card(config(), summary, merged=True), model_card(config(), SUMMARY)):
        assert "151645" not in other and "max_new_tokens=256)" in other
