"""`make eval-lm`: lm-eval on the models of a run, with tasks from a folder."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from sft_play.commands import harness
from sft_play.commands.harness import Options, batch_tokens, evaluate_tasks, fitting_tokens
from sft_play.commands.merge import merge
from sft_play.errors import CheckpointError, ConfigError, DoesNotFitError
from sft_play.model.build import load_for_inference
from sft_play.model.load import load_tokenizer
from sft_play.runlog import RunDir
from tests.unit.finished_run import FinishedRun, make_config, question_rows, train_by_heart, write_rows

INSTALL = "needs the extra `lm-eval`: make install EXTRAS=lm-eval"
CHOICES = """
task: {name}
dataset_path: {path}
{kwargs}
output_type: multiple_choice
test_split: test
doc_to_text: "<user> {{{{question}}}} <assistant>"
doc_to_choice: "{{{{answers}}}}"
doc_to_target: "{{{{right}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(scope="module")
def trained(tiny_model, tmp_path_factory):
    return train_by_heart(make_config(tiny_model, tmp_path_factory.mktemp("harness")))


@pytest.fixture
def finished(trained, tmp_path):
    run = RunDir(tmp_path / "runs" / "lora")
    shutil.copytree(trained.run.path, run.path)
    return FinishedRun(trained.config, run)


@pytest.fixture
def tasks(tmp_path):
    """Tasks `learned` (choose between two answers), `told` (generate one) and `elsewhere` (on the Hub)."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = question_rows()
    asked = []
    for number, row in enumerate(rows):
        wrong = rows[(number + 1) % len(rows)]["answer"]
        pair = [wrong, row["answer"]] if number % 2 else [row["answer"], wrong]
        asked.append({**row, "answers": pair, "right": number % 2})
    file = write_rows(folder / "rows.jsonl", asked)
    local = f"dataset_kwargs: {{data_files: {{test: {file}}}}}"
    (folder / "learned.yaml").write_text(CHOICES.format(name="learned", path="json", kwargs=local))
    (folder / "elsewhere.yaml").write_text(
        CHOICES.format(name="elsewhere", path="nobody/no-such-rows", kwargs="")
    )
    (folder / "told.yaml").write_text(
        f"task: told\ndataset_path: json\n{local}\noutput_type: generate_until\ntest_split: test\n"
        'doc_to_text: "{{question}}"\ndoc_to_target: "{{answer}}"\n'
        "generation_kwargs: {max_gen_toks: 8, do_sample: false}\n"
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
    )
    return folder


# --- with lm-eval ---


@pytest.fixture
def lm_eval():
    return pytest.importorskip("lm_eval", reason=INSTALL)


def run_tasks(finished, tasks, *names, **options):
    return evaluate_tasks(finished.config, finished.run, Options(names, folder=tasks, **options))["tasks"]


def test_each_model_gets_its_scores_and_they_stand_beside_each_other(lm_eval, finished, tasks, capfd):
    merge(finished.config, finished.run)
    capfd.readouterr()
    accuracy = {
        part: run_tasks(finished, tasks, "learned", part=part)["learned"]["metrics"]["acc"]["value"]
        for part in ("result", "merged", "base")
    }
    assert accuracy["result"] == accuracy["merged"] == 1.0 and accuracy["base"] < 0.9
    lines = [" ".join(line.split()) for line in capfd.readouterr().out.splitlines()]
    assert "task metric rows base adapter merged" in lines
    base = json.loads(finished.run.harness.read_text())["models"]["base"]["learned"]["metrics"]["acc"]
    assert f"learned acc 24 {base['value']:.4g} ± {base['stderr']:.2g} 1 1" in lines


def test_answers_are_generated_with_the_chat_template_and_end_where_the_run_taught(lm_eval, finished, tasks):
    found = run_tasks(finished, tasks, "told", "learned", chat=True, limit=5)
    assert list(found) == ["told (chat, limit 5)", "learned (chat, limit 5)"]
    told = found["told (chat, limit 5)"]
    assert told["metrics"]["exact_match"]["value"] == 1.0 and told["rows"] == 5
    plain = run_tasks(finished, tasks, "told", limit=5)["told (limit 5)"]
    assert plain["metrics"]["exact_match"]["value"] < 1


def test_the_perplexity_of_texts_is_that_of_the_model(lm_eval, finished, tasks):
    text = "w1 w22 w3 w44 w5"
    file = write_rows(tasks / "texts.jsonl", [{"text": text}])
    (tasks / "texts.yaml").write_text(
        f"task: texts\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {file}}}}}\n"
        'output_type: loglikelihood_rolling\ntest_split: test\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
        "metric_list: [{metric: word_perplexity}]\n"
    )
    found = run_tasks(finished, tasks, "texts")["texts"]["metrics"]["word_perplexity"]["value"]
    model = load_for_inference(finished.config, finished.run.adapter)
    ids = torch.tensor([[1, *load_tokenizer(finished.config.model)(text)["input_ids"]]])
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss
    assert found == pytest.approx(float(loss.exp()), rel=1e-4)


def test_batches_have_the_tokens_of_a_micro_batch_of_the_plan_and_nothing_is_tried_out(
    lm_eval, finished, tasks, monkeypatch
):
    from lm_eval.models.huggingface import HFLM

    shapes = []
    call = HFLM._model_call

    def noted(self, inputs, *rest, **more):
        shapes.append(tuple(inputs.shape))
        return call(self, inputs, *rest, **more)

    monkeypatch.setattr(HFLM, "_model_call", noted)
    plan = {"micro_batch_size": 3, "max_seq_len": 9, "packing": False}
    finished.run.write_json(finished.run.plan, {"plan": plan})
    run_tasks(finished, tasks, "learned")
    assert all(rows * (width + 1) <= 27 for rows, width in shapes)
    assert sum(rows for rows, _ in shapes) <= 48 and max(rows for rows, _ in shapes) > 1
    settings = finished.config.eval.model_copy(update={"batch_size": 5})
    config = finished.config.model_copy(update={"eval": settings})
    shapes.clear()
    run_tasks(FinishedRun(config, finished.run), tasks, "learned")
    assert {rows for rows, _ in shapes[:-1]} == {5}


def test_a_data_set_that_cannot_be_loaded_is_named_before_the_model_is(lm_eval, finished, tasks, monkeypatch):
    monkeypatch.setattr(harness, "load_for_inference", lambda *_: pytest.fail("loaded"))
    with pytest.raises(
        ConfigError, match=r"TASKS=learned,elsewhere: lm-eval .* cannot run it: .*'nobody/no-such-rows'"
    ):
        run_tasks(finished, tasks, "learned", "elsewhere")


def test_an_unknown_task_is_named_with_the_command_that_lists_all(lm_eval, finished, tasks, monkeypatch):
    from lm_eval.tasks import TaskManager

    def without_defaults(include_path=None, include_defaults=False):  # reading their 14,000 takes long
        return TaskManager(include_path=include_path, include_defaults=False)

    monkeypatch.setattr("lm_eval.tasks.TaskManager", without_defaults)
    with pytest.raises(
        ConfigError,
        match=r"TASKS=told,learnt: lm-eval .*'learnt' is not a registered task[^\n]*\n.*lm-eval ls tasks",
    ):
        run_tasks(finished, tasks, "told", "learnt")


def test_a_task_that_is_broken_is_told_in_a_sentence_and_its_traceback_is_in_the_log(
    lm_eval, finished, tasks
):
    text = (tasks / "learned.yaml").read_text()
    (tasks / "learned.yaml").write_text(text.replace("{{answers}}", "{{nothing.there}}"))
    with pytest.raises(
        ConfigError, match=r"TASKS=learned: lm-eval .* cannot run it: \w+: .*\nThe traceback is in"
    ):
        run_tasks(finished, tasks, "learned")
    assert "Traceback" in finished.run.log.read_text() and not finished.run.harness.exists()


def test_memory_that_runs_out_is_told_with_what_to_set(lm_eval, finished, tasks, monkeypatch):
    from lm_eval.models.huggingface import HFLM

    def fail(self, *_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(HFLM, "_model_call", fail)
    with pytest.raises(DoesNotFitError, match="out of memory in TASKS=learned: .*\nSet eval.batch_size=1"):
        run_tasks(finished, tasks, "learned")


# --- without it ---


@pytest.fixture
def pretended(monkeypatch):
    """Checks what comes after the one for lm-eval, installed or not."""
    monkeypatch.setattr(harness, "find_spec", lambda name: object())


def test_without_the_extra_the_command_that_installs_it_is_named(finished, monkeypatch):
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs lm-eval \(not installed\).*(lm_eval|EXTRAS=lm-eval)"):
        evaluate_tasks(finished.config, finished.run, Options(("hellaswag",)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (Options(()), "TASKS= names no task"),
        (Options(("a",), folder=Path("/no/such")), "IN=/no/such is not a folder"),
    ],
)
def test_what_was_typed_is_checked_first(finished, options, said):
    with pytest.raises(ConfigError, match=said):
        evaluate_tasks(finished.config, finished.run, options)


def test_only_the_merged_model_of_this_run_is_taken_and_only_a_finished_run(pretended, finished):
    with pytest.raises(CheckpointError, match="has no merged model yet; run `make merge RUN=.*` first"):
        evaluate_tasks(finished.config, finished.run, Options(("a",), part="merged"))
    merge(finished.config, finished.run)
    weights = finished.run.merged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\1")
    with pytest.raises(
        CheckpointError, match="model.safetensors has changed .*\nrun `make merge RUN=.*` again"
    ):
        evaluate_tasks(finished.config, finished.run, Options(("a",), part="merged"))
    with pytest.raises(CheckpointError, match="there is no run .*`make train`"):
        evaluate_tasks(finished.config, RunDir(finished.run.path / "never"), Options(("a",)))


def test_a_batch_has_no_more_tokens_than_logits_fit(finished, monkeypatch):
    run = finished.run
    monkeypatch.setattr(harness, "detect_host", lambda: type("Host", (), {"ram_free_bytes": 24_000_000}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert fitting_tokens(1000) == 1000 and fitting_tokens(10**9) == 1
    assert batch_tokens(run, 1000) == 1000
    for packing, tokens in ((False, 800), (True, 8)):
        run.write_json(run.plan, {"plan": {"micro_batch_size": 8, "max_seq_len": 100, "packing": packing}})
        assert batch_tokens(run, 1000) == tokens and batch_tokens(run, 5) == 5
