import io
import subprocess
import sys

from rich.console import Console

from sft_play.report.tables import (
    LogitDifference,
    Tolerance,
    evaluation_table,
    logits_table,
    memory_line,
    metric_table,
    samples_table,
    shorten,
    step_line,
)
from sft_play.units import GIB

SCORES = {
    "dtype": "bfloat16",
    "rows": 1319,
    "supervised_tokens": 168_000,
    "loss": 0.5,
    "perplexity": 1.6487,
    "token_accuracy": 0.8125,
    "answered_rows": 100,
    "exact_match": 0.42,
    "exact_match_rows": 100,
    "rouge_l": 0.6,
    "chrf": 55.75,
    "unfinished_answers": 0,
    "max_new_tokens": 64,
    "seconds": 100,
}
RESULT = {
    **SCORES,
    "name": "gsm8k",
    "split": "test",
    "models": {
        "base": {**SCORES, "loss": 2.5, "unfinished_answers": 7},
        "adapter": SCORES,
        "merged": {**SCORES, "loss": 0.51},
    },
    "left_out": None,
}
SAMPLES = [{"prompt": "1 + 1?", "reference": "2", "before": "", "after": "[bold]2[/bold]"}]


def shown(renderable, width=110):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(renderable)
    return console.file.getvalue()


def evaluation_lines(**changed):
    return [" ".join(line.split()) for line in shown(evaluation_table(RESULT | changed)).splitlines()]


def test_evaluation_table_has_a_column_for_each_model_and_the_rows_it_was_computed_on():
    lines = evaluation_lines()
    assert lines[0] == "gsm8k on the test split the loss is over 168K supervised tokens"
    assert lines[1:4] == [
        "metric base adapter merged",
        "loss 2.5000 0.5000 0.5100",
        "perplexity 1.65 1.65 1.65",
    ]
    assert "exact match 42.0% 42.0% 42.0%" in lines
    assert "rows 1,319 1,319 1,319" in lines and "answers 100 100 100" in lines
    assert "time 1 min 40 s 1 min 40 s 1 min 40 s" in lines


def test_evaluation_table_says_what_must_be_known_to_compare_the_columns():
    lines = evaluation_lines(exact_match_rows=90)
    assert "base: 7 of 100 answers were truncated at 64 tokens (eval.max_new_tokens)" in lines
    alone = {"adapter": {**SCORES, "answered_rows": 1, "unfinished_answers": 1, "max_new_tokens": 2048}}
    assert "adapter: 1 of 1 answer was truncated at 2,048 tokens (eval.max_new_tokens)" in evaluation_lines(
        models=alone
    )
    assert "exact match: over 90 rows whose reference matches eval.answer_pattern" in lines
    assert not any("not computed alike" in line or "omitted" in line for line in lines)
    models = {"adapter": {**SCORES, "dtype": "bfloat16 on 4-bit weights"}, "merged": SCORES}
    assert "not computed alike: adapter in bfloat16 on 4-bit weights; merged in bfloat16" in evaluation_lines(
        models=models
    )
    assert "merged: omitted, because it is damaged" in evaluation_lines(left_out="it is damaged")


def test_a_metric_that_was_not_measured_reads_as_not_available():
    models = {"base": {key: value for key, value in SCORES.items() if key != "chrf"}, "adapter": SCORES}
    assert "chrF (0 to 100) n/a 55.8" in evaluation_lines(models=models)
    assert "chrF" not in str(metric_table({"before": {"loss": 1.0}, "after": {"loss": 0.5}}).rows)


def test_a_prediction_that_is_absurd_is_called_wrong_and_its_profile_is_measured_again_if_it_lied():
    wrong = "took 372 ms; the plan's 21 min 50 s was wrong"
    assert step_line(1309.5, 0.372) == wrong
    assert step_line(0.4, 0.372, "probe", 1309.5) == f"{wrong}, its profile is measured again next time"
    assert step_line(0.5, 14.0) == "took 14.0 s; the plan's 500 ms was wrong"
    assert step_line(1309.5, None) == "predicted 21 min 50 s, measured n/a"


def test_memory_line_says_in_which_direction_the_prediction_was_off():
    assert memory_line(100 * GIB, 101 * GIB).endswith("(prediction 1.0% too low)")
    assert memory_line(110 * GIB, 100 * GIB).endswith("(prediction 10.0% too high)")
    assert memory_line(100 * GIB, 4 * GIB).endswith("(prediction 25 times too high)")
    assert memory_line(10_000 * GIB, 10_001 * GIB).endswith("(prediction accurate to 0.05%)")
    assert memory_line(GIB, GIB, "earlier run") == "from an earlier run 1.00 GiB, measured 1.00 GiB"
    assert "prediction 50% too low" in step_line(1.0, 2.0, "profile")
    earlier = step_line(1.0, 2.0, "earlier run")
    assert earlier.startswith("from an earlier run 1") and "predict" not in earlier
    probed = step_line(0.37, 0.38, "probe")
    assert probed.startswith("probed 370 ms") and "predict" not in probed
    assert memory_line(None, 2 * GIB) == "predicted n/a, measured 2.00 GiB"


def test_long_texts_are_cut_with_a_note_of_what_is_missing():
    assert shorten("  short \n") == "short"
    assert shorten("x" * 1450, limit=400) == "x" * 400 + " ... (1,050 more characters)"
    assert shorten("\n".join("abcdefghijkl"), lines=3) == "a\nb\nc ... (18 more characters)"


def test_answers_are_shown_as_they_are_and_never_read_as_markup():
    text = shown(samples_table(SAMPLES))
    assert "[bold]2[/bold]" in text
    assert "(empty)" in text


def test_answers_stand_side_by_side_with_what_is_right_and_wrong():
    sample = {"prompt": "q", "reference": "b", "base": "a", "adapter": "b", "merged": "b"}
    right = {"base": False, "adapter": True, "merged": None}
    lines = [
        " ".join(line.split()) for line in shown(samples_table([{**sample, "right": right}])).splitlines()
    ]
    assert lines == ["prompt q", "reference b", "base, wrong adapter, right merged", "a b b"]


def test_functions_of_ones_own_have_rows_beside_the_metrics():
    models = {
        "base": SCORES | {"own_metrics": {"polite": 0.25}},
        "adapter": SCORES | {"own_metrics": "damaged"},
    }
    assert "polite 0.25 n/a" in evaluation_lines(models=models)


LOGITS = {
    "merged": LogitDifference(0.05, 0.002, 0.001, top1=0.995, positions=1024),
    "base": LogitDifference(5.0, 0.5, 0.25, top1=0.54, positions=1024),
}


def test_logits_table_states_the_tolerance_and_the_verdict():
    compared = LOGITS, Tolerance(0.02, 0.95), "bfloat16", 8
    text = shown(logits_table(*compared, passed=True))
    assert "passed: compared with the adapter on the unquantized base, 8 rows, 1,024 positions" in text
    assert "tolerance for bfloat16" in text
    assert ">= 95.0%" in text
    assert "4-bit" not in text
    assert "failed: compared" in shown(logits_table(*compared, passed=False))


def test_tables_need_no_torch():
    code = "import sys, sft_play.report.tables; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_perplexity_of_a_diverged_model_is_short():
    scores = {name: {"perplexity": value} for name, value in (("before", 7588.31), ("after", 3.67e37))}
    assert metric_table(scores).rows == [("perplexity", "7,588.31", "3.7e+37")]
