import gc
import json
import math
import re
import shutil
import weakref

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from sft_play.commands import models
from sft_play.commands.evaluate import before_after, evaluate_run, score_rows
from sft_play.commands.merge import merge
from sft_play.data.prepare import prepare
from sft_play.errors import CheckpointError, ConfigError
from sft_play.manifest import CARD
from sft_play.model.build import load_for_inference
from sft_play.model.load import load_tokenizer
from sft_play.report.card import write_card
from sft_play.runlog import RunDir
from tests.conftest import VOCABULARY, token_rows
from tests.rounding import assert_same_values, forward_terms, summed
from tests.unit.finished_run import (
    ROWS,
    FinishedRun,
    make_config,
    question_rows,
    train_by_heart,
    write_rows,
)


@pytest.fixture(scope="module")
def finished(tiny_model, tmp_path_factory):
    return train_by_heart(make_config(tiny_model, tmp_path_factory.mktemp("evaluate"), samples=2))


@pytest.fixture(scope="module")
def finished_full(tiny_model, tmp_path_factory):
    return train_by_heart(make_config(tiny_model, tmp_path_factory.mktemp("evaluate"), "full"))


@pytest.fixture(scope="module")
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model).eval()


@pytest.fixture(scope="module")
def rows():
    return Dataset.from_list(token_rows(11, seed=3))


def plain_loss(model, rows):
    """Row by row with the model's own logits: what the sums must be."""
    nll, tokens, correct = 0.0, 0, 0
    for row in rows:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1].double()
        labels = torch.tensor(row["labels"])[1:]
        learned = labels != -100
        nll += torch.nn.functional.cross_entropy(logits[learned], labels[learned], reduction="sum").item()
        tokens += int(learned.sum())
        correct += int((logits.argmax(-1) == labels)[learned].sum())
    return nll, tokens, correct


def near(model) -> float:
    """Of two orders of the sums of a loss: logits of rows of up to 60 tokens, and the softmax."""
    return summed(forward_terms(model, tokens=60) + VOCABULARY)


@pytest.mark.parametrize("batch_size", [1, 4, 11])
def test_token_loss_weighs_each_supervised_token_alike_in_any_batch(model, rows, batch_size):
    nll, tokens, correct = plain_loss(model, rows)
    score = score_rows(model, rows, 0, batch_size=batch_size)
    assert (score.tokens, score.correct) == (tokens, correct)
    assert_same_values([score.loss], [nll / tokens], near(model))


def test_token_loss_of_an_adapter_model_counts_the_adapter(finished, rows):
    model = load_for_inference(finished.config, finished.run.adapter)
    nll, tokens, _ = plain_loss(model, rows)
    found = score_rows(model, rows, 0, batch_size=4).loss
    assert_same_values([found], [nll / tokens], near(model))
    with model.disable_adapter():
        base = score_rows(model, rows, 0, batch_size=4).loss
    assert abs(base - nll / tokens) > 0.01


def test_a_loss_does_not_disturb_generation_afterwards(finished):
    model = load_for_inference(finished.config, finished.run.adapter)
    prompt = torch.tensor([[5, 6, 7]])
    before = model.generate(input_ids=prompt, max_new_tokens=5, do_sample=False)
    score_rows(model, Dataset.from_list(token_rows(2)), 0, batch_size=2)
    assert torch.equal(before, model.generate(input_ids=prompt, max_new_tokens=5, do_sample=False))


def test_evaluation_of_a_finished_run_writes_metrics_and_every_answer(finished):
    result = evaluate_run(finished.config, finished.run, "test")
    rows = question_rows()
    assert (result["rows"], result["answered_rows"], result["exact_match"], result["chrf"]) == (
        ROWS,
        ROWS,
        1.0,
        100.0,
    )
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert result["token_accuracy"] == 1.0
    assert result["supervised_tokens"] == sum(
        len(row["answer"].split()) + 1 for row in rows
    )  # words and the end of turn
    assert json.loads((finished.run.path / "eval.test.json").read_text()) == result
    answers = [json.loads(line) for line in (finished.run.path / "eval.test.jsonl").read_text().splitlines()]
    assert [answer["generated"] for answer in answers] == [row["answer"] for row in rows]
    assert answers[0]["messages"] == [{"role": "user", "content": rows[0]["question"]}]
    assert answers[0]["reference"] == rows[0]["answer"]
    assert (answers[0]["exact_match"], answers[0]["finished"]) == (True, True)


def test_the_limit_is_for_answers_and_not_for_the_loss(finished):
    result = evaluate_run(finished.config, finished.run, "val", limit=5)
    assert (result["rows"], result["answered_rows"]) == (ROWS, 5)
    assert len((finished.run.path / "eval.val.jsonl").read_text().splitlines()) == 5


def test_the_answer_pattern_decides_what_is_compared(finished):
    settings = finished.config.eval.model_copy(update={"answer_pattern": r"w(\d)\d*$"})
    config = finished.config.model_copy(update={"eval": settings})
    assert evaluate_run(config, finished.run, "val", limit=3)["exact_match"] == 1.0


def test_a_pattern_that_matches_no_reference_is_reported_before_a_model_is_loaded(finished, monkeypatch):
    monkeypatch.setattr(models, "load_for_inference", lambda *_, **__: pytest.fail("loaded"))
    settings = finished.config.eval.model_copy(update={"answer_pattern": "####"})
    config = finished.config.model_copy(update={"eval": settings})
    with pytest.raises(ConfigError, match="'####' matches none of the 24 references"):
        evaluate_run(config, finished.run, "val")


def test_a_split_that_the_config_does_not_have_is_named_with_what_would_give_it_rows(finished):
    data = finished.config.data.model_copy(update={"test_path": None})
    config = finished.config.model_copy(update={"data": data})
    with pytest.raises(
        ConfigError, match=r"SPLIT=test: .*data\.test_path or data\.test_fraction, or use SPLIT=val"
    ):
        evaluate_run(config, finished.run, "test")


def test_plain_text_has_a_loss_and_no_answers(finished, tmp_path):
    texts = write_rows(tmp_path / "texts.jsonl", [{"text": f"w{i} w{i + 1} w{i + 2}"} for i in range(12)])
    paths = {name: str(texts) for name in ("train_path", "val_path", "test_path")}
    config = finished.config.model_copy(update={"data": finished.config.data.model_copy(update=paths)})
    result = evaluate_run(config, finished.run, "val")
    assert result["loss"] > 0
    assert result["answered_rows"] == 0
    assert compare(finished._replace(config=config)) is None


def test_without_an_adapter_the_next_command_is_named(tiny_model, tmp_path):
    config = make_config(tiny_model, tmp_path)
    with pytest.raises(CheckpointError, match="make train"):
        evaluate_run(config, RunDir(tmp_path / "runs" / "lora"), "val")


# --- base, adapter and merged model ---


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the run, to be merged or spoilt."""
    run = RunDir(tmp_path / "runs" / "lora")
    shutil.copytree(finished.run.path, run.path, ignore=shutil.ignore_patterns("eval.*", "merged"))
    return FinishedRun(finished.config, run)


def test_base_adapter_and_merged_model_are_compared_and_the_base_is_loaded_once(copied, monkeypatch, capfd):
    merge(copied.config, copied.run)
    loaded = []

    def noted(config, weights):
        loaded.append(weights)
        return load_for_inference(config, weights)

    monkeypatch.setattr(models, "load_for_inference", noted)
    result = evaluate_run(copied.config, copied.run, "test", limit=4)
    assert loaded == [copied.run.adapter, copied.run.merged]
    base, adapter, merged = (result["models"][name] for name in ("base", "adapter", "merged"))
    untouched = load_for_inference(copied.config, None)
    rows = prepare(copied.config, load_tokenizer(copied.config.model), model_limit=512, progress=False).test
    nll, tokens, _ = plain_loss(untouched, rows)
    assert_same_values([base["loss"]], [nll / tokens], near(untouched))
    assert merged["loss"] == pytest.approx(adapter["loss"], rel=1e-3) and result["loss"] == adapter["loss"]
    assert (base["exact_match"], adapter["exact_match"], merged["exact_match"]) == (0.0, 1.0, 1.0)
    assert result["left_out"] is None and "omitted" not in capfd.readouterr().out
    line = json.loads((copied.run.path / "eval.test.jsonl").read_text().splitlines()[0])
    assert line["base"] != line["generated"] == line["merged"] == line["reference"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda folder: shutil.rmtree(folder), "has no merged model yet; run `make merge RUN=.*` first"),
        (lambda folder: change(folder / "merge.json", adapter_sha256="0"), "merged from another version of .*run `make merge RUN=.*` again"),
        (lambda folder: change(folder / "merge.json", adapter_sha256="0", adapter="runs/b/adapter"), "merged from runs/b/adapter, not from .*run `make merge RUN=.*` again"),
        (lambda folder: change(folder / "config.json", hidden_size=1), "is damaged: config.json has .*run `make merge RUN=.*` again"),
    ],
    ids=["none", "earlier adapter", "another run", "changed"],
)  # fmt: skip
def test_a_merged_model_that_is_not_that_of_the_run_is_left_out_in_one_line(copied, spoil, reason, capfd):
    merge(copied.config, copied.run)
    spoil(copied.run.merged)
    result = evaluate_run(copied.config, copied.run, "test", limit=1)
    assert list(result["models"]) == ["base", "adapter"]
    shown = " ".join(capfd.readouterr().out.split())
    for text in (result["left_out"], shown):
        assert re.search(reason, text)
    assert "\n" not in result["left_out"] and "merged: omitted, because" in shown


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_full_fine_tuning_is_compared_with_its_base(finished_full):
    result = evaluate_run(finished_full.config, finished_full.run, "test", limit=2)
    assert list(result["models"]) == ["base", "result"] and result["left_out"] is None
    assert result["loss"] == result["models"]["result"]["loss"] < result["models"]["base"]["loss"]


@pytest.mark.thorough
def test_model_cards_get_the_scores_unless_somebody_edited_them(copied):
    merge(copied.config, copied.run)
    write_card(copied.config, copied.run, copied.run.adapter)
    edited = copied.run.merged / CARD
    edited.write_text("# My own words\n")
    evaluate_run(copied.config, copied.run, "test", limit=1)
    evaluate_run(copied.config, copied.run, "val", limit=1)
    card = (copied.run.adapter / CARD).read_text()
    assert (
        "on the val split" in card
        and "on the test split" in card
        and "| metric | base | adapter | merged |" in card
    )
    assert edited.read_text() == "# My own words\n"


def compare(finished):
    tokenizer = load_tokenizer(finished.config.model)
    data = prepare(finished.config, tokenizer, model_limit=512, progress=False)
    return before_after(finished.config, finished.run, data, tokenizer)


def test_answers_before_and_after_training_differ_as_the_training_did(finished):
    result = compare(finished)
    assert result.scores["before"]["exact_match"] == 0.0
    assert result.scores["after"]["exact_match"] == 1.0
    assert result.scores["after"]["split"] == "test"
    assert result.scores["before"]["answered_rows"] == ROWS
    rows = question_rows()
    assert [sample["prompt"] for sample in result.samples] == [row["question"] for row in rows[:2]]
    for sample, row in zip(result.samples, rows, strict=False):
        assert sample["reference"] == sample["after"] == row["answer"]
        assert sample["before"] != row["answer"]


@pytest.mark.thorough
def test_before_full_fine_tuning_means_the_untouched_base(finished, finished_full):
    lora, full = compare(finished), compare(finished_full)
    assert [sample["before"] for sample in full.samples[:2]] == [sample["before"] for sample in lora.samples]
    assert full.scores["after"]["exact_match"] == 1.0


@pytest.mark.thorough
def test_memory_is_given_back_and_two_full_models_are_never_held_at_once(finished_full, monkeypatch):
    alive = weakref.WeakSet()
    counts = []

    def counted(*args, **kwargs):
        gc.collect()
        counts.append(len(alive))
        model = load_for_inference(*args, **kwargs)
        alive.add(model)
        return model

    monkeypatch.setattr(models, "load_for_inference", counted)
    compare(finished_full)
    assert counts == [0, 0]
    assert not alive
