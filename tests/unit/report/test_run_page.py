"""The report of a run: every section, whatever is missing or damaged, and nothing that a text could do."""

import html
import json
import re
from dataclasses import replace

import pytest

from sft_play.commands.report import write_report
from sft_play.errors import StorageError
from sft_play.plan import EARLIER
from sft_play.report.html import Page, render, write_page
from sft_play.report.record import read_run
from sft_play.report.run_page import facts, run_page
from sft_play.runlog import read_json, update_summary
from tests.conftest import file_size_limit
from tests.unit.report.written_run import ATTACK, SECTIONS, begin, finished, no_plots, train  # noqa: F401

pytestmark = pytest.mark.usefixtures("no_plots")


def section(page: str, name: str) -> str:
    """The texts of a section, without tags, in one line."""
    found = re.search(rf'<section id="{name}".*?</section>', page, re.DOTALL)
    assert found, name
    return html.unescape(" ".join(re.sub(r"<[^>]+>", " ", found[0].replace("<wbr>", "")).split()))


def page_of(run) -> str:
    return write_report(run.path).read_text()


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    return page_of(finished(tmp_path_factory.mktemp("runs") / "one"))


def test_a_finished_run_fills_every_section(page):
    assert re.findall(r'<section id="(\w+)"', page) == list(SECTIONS)
    assert "Nothing was recorded" not in page and "is damaged" not in page
    assert "Done." in page and "LoRA of base on rows.jsonl" in page
    header = " ".join(re.sub(r"<[^>]+>", " ", page[: page.index("<nav")]).split())
    assert "started 2026-11-20 10:30 machine 1 x NVIDIA H100 commit 0123456789ab" in header
    command = "make train CONFIG=.../run.yaml (its folders are in environment.json)"
    assert f"command {command} next make infer RUN=one" in header


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("asked", ["train.max_steps 20 run.yaml", "train.learning_rate 0.001 override", "train.seed 0 default"]),
        ("chosen", ["train.batch_size auto 4 planner", "train.learning_rate 0.001 0.001 override"]),
        ("chosen", ["micro-batch 4: the fastest that fits", "2 x 4 recomputed 75% 512.00 MiB"]),
        ("memory", ["backward 1.00 GiB 1.01 GiB +0.98% 50.0%", "activations 0 B 600.00 MiB"]),
        ("memory", ["The budget of a process is 2.00 GiB.", "weights", "measured by the probe"]),
        ("training", ["Last training loss: 1.0000; last held-out loss: 2.0000", "Learning rate"]),
        ("training", ["Gradient norm", "Tokens per second", "optimizer step", "nats per token"]),
        ("speed", ["predicted 500 ms, measured 600 ms (prediction 17% too low)", "Seconds per step"]),
        ("scaling", ["1 (this run) 4 2 8 10 1.0e-03 1.0e-03 1.0e-03 one process 1.00 0% 1.00x 2 4 1 8 10 1.0e-03 1.0e-03 1.0e-03 DDP"]),
        ("scaling", ["processes", "4 processes: fewer rows than", "each of 2 processes sends 3.00 GiB per step"]),
        ("data", ["train val rows 100 100 tokens 5,000 5,000 supervised 50.0% 50.0%", "dropped 2 2 median 40 40", "2 rows dropped: empty", "few rows", "abc123"]),
        ("data", ["Length of the training rows", "Bins of 3 tokens; 100 rows, the longest 1 as the last bar"]),
        ("scores", ["metric before after make eval, val", "loss 2.0000 0.7500 0.7000", "10 answers on test"]),
        ("answers", ["before training (empty)", "prompt 3 + 4? reference 7 answer seven"]),
        ("environment", ["GPU 0 NVIDIA H100, 80.00 GiB", "driver 570.1 (CUDA 12.8)", "torch 2.13.0"]),
    ],
)  # fmt: skip
def test_a_section_says_what_the_files_hold(page, name, words):
    for text in words:
        assert text in section(page, name)


def test_texts_of_people_are_not_markup(tmp_path):
    run = finished(tmp_path / ATTACK.replace("/", "_"), origin=f"/home/ann/{ATTACK.replace('/', '_')}.yaml")
    page = page_of(run)
    assert "<script" not in page and page.count("&lt;script&gt;") >= 4
    assert "script" not in re.search(r"default-src 'none'[^\"]*", page)[0]


def test_a_note_is_shown_as_it_was_written(tmp_path):
    page = page_of(begin(tmp_path / "one", note=f"as before, {ATTACK}"))
    assert "<dt>note</dt><dd>as before, &lt;script&gt;" in page


def test_the_pictures_of_examples_are_in_the_page_and_nothing_else_is_loaded(tmp_path):
    run = finished(tmp_path / "one")
    sample = {"prompt": "<image>what?", "reference": "a", "before": "b", "after": "c"}
    small = "data:image/jpeg;base64,/9j4"
    images = [small, "http://example.org/a.png", 'data:image/jpeg;base64,"><script>', 5]
    update_summary(run, samples=[sample | {"images": images}, sample | {"images": "x"}])
    page = render(run_page(read_run(run.path)))
    assert re.findall("<img src=[^>]*>", page) == [f'<img src="{small}" alt="image 1">']
    assert "img-src data:;" in page and "example.org" not in page


def test_a_report_says_of_which_step_the_weights_are(tmp_path):
    run = finished(tmp_path / "one")
    saved = {"weights_step": 8, "optimizer_steps": 12, "best_checkpoint": "checkpoint-8"}
    run.write_json(run.summary, {**read_json(run.summary), **saved})
    assert ("weights of", "step 8 of 12, the best on held-out rows") in facts(read_run(run.path))


def test_folders_of_the_machine_are_left_out(page):
    assert "/home" not in page


def test_a_command_is_shown_as_typed_or_says_where_its_folders_are(tmp_path):
    run = finished(tmp_path / "one")
    assert "CONFIG=.../run.yaml (its folders are in environment.json)</dd>" in page_of(run)
    run.write_json(run.environment, {"command": "make train CONFIG=my.yaml"})
    assert "<dd>make train CONFIG=my.yaml</dd>" in page_of(run)


def test_access_tokens_are_masked_also_those_that_escaping_would_change(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "a&b<c>d'e")
    run = finished(tmp_path / "one")
    answer = {"messages": [{"content": "a&b<c>d'e"}], "reference": "hf_" + "x" * 30, "generated": "ok"}
    (run.path / "eval.val.jsonl").write_text(json.dumps(answer))
    page = page_of(run)
    assert "a&amp;b" not in page and "hf_xxx" not in page and "*********" in page


def test_the_page_loads_and_runs_nothing_and_its_ids_are_unique(page):
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', page)) and "http://" not in page.replace(
        "http://www.w3.org/1999/xlink", ""
    )
    used = {name for pair in re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', page) for name in pair if name}
    assert used <= set(ids)
    assert not re.search(r"<(?:link|img|script|iframe)|@import|src=", page)


def test_every_plot_has_a_name_and_its_colours_follow_the_theme(page):
    plots = re.findall(r"<svg [^>]*>", page)
    assert len(plots) == 7 and all(re.search(r'role="img" aria-label="\w', plot) for plot in plots)
    assert not re.search(r"#0000\w\w\b", page) and "var(--ink)" in page


def test_what_an_earlier_run_measured_is_nowhere_called_a_prediction(tmp_path):
    run = finished(tmp_path / "one")
    assert all(words in page_of(run) for words in ("predicted and measured", "predicted: 500 ms"))
    tree, summary = read_json(run.plan), read_json(run.summary)
    tree["memory"]["origin"] = tree["plan"]["step_seconds_origin"] = EARLIER
    run.write_json(run.plan, tree | {"alternatives": []})
    run.write_json(
        run.summary, summary | {"predicted_memory_origin": EARLIER, "predicted_step_origin": EARLIER}
    )
    run.scaling.unlink()  # plans for other numbers of processes are predictions
    text = page_of(run)
    assert "make report RUN=" in section(text, "scaling") and "plans the same run on other" in text
    assert "predict" not in text
    assert "Memory by phase, from an earlier run and measured" in text
    assert "from an earlier run: 500 ms" in text


def test_a_run_that_failed_half_way_shows_what_there_is(tmp_path):
    page = page_of(train(begin(tmp_path / "half"), steps=7))
    assert "Not finished" in page and "7 of 20 steps recorded" in page
    assert re.search(r"<dt>peak memory, predicted</dt><dd>1.00 GiB", page)
    assert "Nothing was recorded" in section(page, "scores")
    assert "Nothing was measured by phase" in section(page, "memory")
    assert "predicted 500 ms, measured 600 ms" in section(page, "speed")
    assert "Nothing was recorded" not in section(page, "training") + section(page, "data")


def test_a_run_that_is_running_says_what_comes_later(tmp_path):
    run = read_run(train(begin(tmp_path / "live"), steps=7).path)
    page = render(run_page(replace(run, activity="running")))
    assert '<progress class="share" value="0.35"' in page
    assert "<dt>training loss</dt><dd>1.6500" in page and "<dt>held-out loss</dt><dd>2.0000" in page
    for name in ("answers", "scores", "scaling"):
        assert "Nothing yet: this is written when the run ends." in section(page, name)
    assert "Nothing was measured by phase yet." in section(page, "memory")
    assert "n/a" not in section(page, "speed")


def test_names_of_settings_may_be_wrapped_between_their_parts(page):
    assert "train.<wbr>effective_<wbr>batch_<wbr>size" in page and "0.001" in page


def test_a_run_that_failed_before_its_first_step_has_a_page(tmp_path):
    (tmp_path / "log.txt").write_text("")
    page = write_report(tmp_path).read_text()
    assert "0 steps recorded" in page and page.count("Nothing was recorded") == len(SECTIONS)


def test_an_interrupted_run_names_the_command_that_continues_it(tmp_path):
    run = train(begin(tmp_path / "one"), steps=7)
    # the last one was not logged
    run.write_json(run.summary, {"status": "interrupted", "optimizer_steps": 8})
    assert "Interrupted with a checkpoint saved, 8 of 20 steps recorded; make resume" in page_of(run)


def test_a_run_that_failed_says_why_without_the_folders_of_the_machine(tmp_path):
    run = train(begin(tmp_path / "one"), steps=7)
    error = "cannot write /home/ann/runs/one/checkpoints: disk full. See https://a.b/c/d\nTraceback"
    run.write_json(run.summary, {"status": "failed", "error": error})
    page = page_of(run)
    assert "Failed: cannot write checkpoints: disk full. See https://a.b/c/d. 7 of 20 steps" in page
    assert "Traceback" not in page and "/home" not in page


def test_a_run_that_failed_after_training_was_trained(tmp_path):
    run = finished(tmp_path / "one")
    run.write_json(run.summary, {"status": "failed", "error": "no answers", "trained": True})
    assert "Trained, but a later stage failed: no answers." in page_of(run)
    run.write_json(run.summary, {"status": "interrupted", "trained": True})
    page = page_of(run)
    assert "Trained, but interrupted before its command was done." in page and "make resume" not in page


@pytest.mark.parametrize("content", ["{", "[]", "\udcff", "null", "[" * 100_000])
def test_a_damaged_summary_is_named_and_left_out(tmp_path, content):
    run = finished(tmp_path / "one")
    run.summary.write_bytes(content.encode("utf-8", "surrogateescape"))
    page = page_of(run)
    assert "Damaged and omitted: summary.json" in page and "train.batch_size" in section(page, "chosen")


@pytest.mark.parametrize(
    ("file", "content", "name"),
    [
        ("eval.val.json", {"split": 1, "loss": "low"}, "scores"),
        ("summary.json", {"status": "done", "samples": [{}]}, "answers"),
        ("plan.json", {"plan": {}, "memory": {"phases": {"load": 1}}}, "memory"),
        ("data.json", {"train": {"rows": "many"}}, "data"),
        ("environment.json", {"gpus": 3}, "environment"),
        ("eval-lm.json", {"models": {"base": {"arc_easy": 3}}}, "scores"),
        ("scaling.json", {"scaling": [{"world_size": 2}]}, "scaling"),
    ],
)
def test_json_of_another_form_costs_its_section_only(tmp_path, file, content, name):
    run = finished(tmp_path / "one")
    (run.path / file).write_text(json.dumps(content))
    page = page_of(run)
    assert "This part of the run's files is damaged" in section(page, name)
    assert "Seconds per step" in section(page, "speed")


def test_the_scores_and_answers_of_each_model_are_beside_each_other(tmp_path):
    run = finished(tmp_path / "one")
    models = {"base": {"loss": 3.0}, "adapter": {"loss": 0.7, "chrf": "high"}, "merged": {"loss": 0.71}}
    run.write_json(run.evaluation("val"), {"split": "val", "loss": 0.7, "models": models})
    answer = {
        "messages": [{"content": "3 + 4?"}],
        "reference": "7",
        "generated": "seven",
        "base": "no",
        "merged": "7!",
    }
    run.evaluation("val").with_suffix(".jsonl").write_text(json.dumps(answer))
    scores, answers = (section(page_of(run), name) for name in ("scores", "answers"))
    assert (
        "make eval, val: base make eval, val: adapter make eval, val: merged loss 2.0000 0.7500 3.0000 0.7000 0.7100"
        in scores
    )
    assert "reference 7 base no answer seven merged 7!" in answers


def test_the_scores_of_lm_eval_are_beside_each_other(tmp_path):
    run = finished(tmp_path / "one")
    base = {"arc_easy": {"metrics": {"acc": {"value": 0.25, "stderr": 0.05}}, "rows": 1000}}
    adapter = {"arc_easy": {"metrics": {"acc": {"value": 0.5}}, "rows": 1000}}
    run.write_json(run.harness, {"models": {"base": base, "adapter": adapter}})
    text = section(page_of(run), "scores")
    assert "task metric rows base adapter arc_easy acc 1,000 0.25 ± 0.05 0.5" in text


@pytest.mark.parametrize("scores", [3, {"before": 3}, {"before": {"loss": "low"}}, {"after": None}])
def test_scores_of_another_form_are_left_out(tmp_path, scores):
    run = finished(tmp_path / "one")
    run.write_json(run.summary, {"status": "done", "eval": scores})
    assert "metric make eval, val loss 0.7000" in section(page_of(run), "scores")


def test_damaged_lines_of_the_metrics_are_left_out(tmp_path):
    run = finished(tmp_path / "one")
    with run.metrics.open("a") as file:
        file.write(
            '[1]\n{"step": "x"}\n{"train/loss": 1}\n{"step": 21, "train/loss": NaN}\n{"step": 22, "tra'
        )
    assert "Last training loss: 1.0000" in page_of(run)


@pytest.mark.parametrize("key", ["step", "train/loss", "speed/tokens_per_second", "memory/peak_bytes"])
@pytest.mark.parametrize("digits", [400, 5000])
def test_a_number_of_thousands_of_digits_is_no_obstacle(tmp_path, key, digits):
    run = finished(tmp_path / "one")
    with run.metrics.open("a") as file:
        file.write(f'{{"step": 21, "train/loss": 1, "{key}": {"9" * digits}}}\n')
    assert page_of(run).rstrip().endswith("</html>")


def test_half_a_character_in_an_answer_is_no_obstacle(tmp_path):
    run = finished(tmp_path / "one")
    answer = {"messages": [{"content": "x"}], "reference": "y", "generated": "\ud83d"}
    (run.path / "eval.val.jsonl").write_text(json.dumps(answer))
    assert "answer ?" in section(page_of(run), "answers")


def test_a_full_disk_leaves_the_earlier_page_and_no_other_file(tmp_path):
    run = finished(tmp_path / "one")
    before, files = page_of(run), sorted(run.path.iterdir())
    page = run_page(read_run(run.path))
    with (
        file_size_limit(10_000),
        pytest.raises(
            StorageError, match=r"cannot write .*report.html: .*Free space there, or make it writable$"
        ),
    ):
        write_page(page, run.report)
    assert run.report.read_text() == before and sorted(run.path.iterdir()) == files


def test_a_page_without_sections_is_whole():
    assert render(Page("one", "two", [])).endswith("</html>")
