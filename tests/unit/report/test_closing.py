import io

import pytest
from rich.console import Console

from sft_play.report.closing import closing_screen, training_time
from sft_play.units import GIB

SUMMARY = {
    "status": "done",
    "world_size": 2,
    "micro_batch_size": 4,
    "gradient_accumulation_steps": 3,
    "effective_batch_size": 24,
    "optimizer_steps": 1200,
    "supervised_tokens": 5_000_000,
    "tokens_per_second": 4321.4,
    "predicted_peak_bytes": 100 * GIB,
    "measured_peak_bytes": 101 * GIB,
    "train_loss": 0.25,
    "training_seconds": 100,
    "eval": {"before": {"loss": 2.0, "perplexity": 7.389}, "after": {"loss": 0.1, "perplexity": 1.105}},
}
ANSWERED = {
    "before": {"exact_match": 0.02, "rouge_l": 0.1, "chrf": 8.0, "answered_rows": 50, "split": "test"},
    "after": {"exact_match": 0.96, "rouge_l": 0.99, "chrf": 98.0, "answered_rows": 50, "split": "test"},
}
SAMPLES = [{"prompt": "1 + 1?", "reference": "2", "before": "", "after": "[bold]2[/bold]"}]


def shown(renderable, width=110):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(renderable)
    return console.file.getvalue()


def lines_of(summary):
    """What is on the screen, with single spaces."""
    text = shown(closing_screen(summary, [], {}, []))
    return [" ".join(line.split()) for line in text.splitlines()]


@pytest.mark.parametrize(
    ("measured", "ending"),
    [
        ({}, "4,321 tokens/s, no padding"),
        ({"mfu": 0.412, "data_wait": 0.004}, "no padding, MFU 41%"),
        ({"padding_share": 0.2, "data_wait": 0.03}, "(20% of all tokens), 3% of the time waiting for data"),
    ],
)
def test_the_speed_comes_with_what_held_it_back(measured, ending):
    lines = lines_of(SUMMARY | measured)
    assert any(line.startswith("speed") and line.endswith(ending) for line in lines), lines


def test_a_gpu_has_reserved_bytes_and_the_process_beside_what_was_predicted():
    sizes = {"reserved": (110, 112), "process": (111, None)}
    summary = SUMMARY | {
        f"{kind}_{name}_bytes": size and size * GIB
        for name, pair in sizes.items()
        for kind, size in zip(("predicted", "measured"), pair, strict=True)
    }
    lines = lines_of(summary)
    assert any(line.startswith("reserved predicted 110.00 GiB, measured 112.00 GiB") for line in lines)
    assert "process predicted 111.00 GiB, measured n/a" in lines
    assert not any(line.startswith("reserved") for line in lines_of(SUMMARY))


def test_the_batch_adds_up_where_micro_batches_differ():
    batch = {"effective_batch_size": 4, "micro_batch_size": 2, "gradient_accumulation_steps": 1}
    lines = lines_of(SUMMARY | batch | {"world_size": 3})
    assert "plan micro-batch 1.33 x accumulation 1 x 3 processes = 4 sequences" in lines


def test_closing_screen_has_the_plan_the_scores_the_samples_the_places_and_the_next_command():
    scores = {when: SUMMARY["eval"][when] | ANSWERED[when] for when in ("before", "after")}
    places = {"adapter": "runs/demo/adapter"}
    text = shown(closing_screen(SUMMARY | {"eval": scores}, SAMPLES, places, ["make infer", "make merge"]))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert any(line.startswith("done: trained for 1 min 40 s") for line in lines)
    assert "plan micro-batch 4 x accumulation 3 x 2 processes = 24 sequences" in lines
    assert "trained on 1,200 steps, 5M supervised tokens" in lines
    assert "speed 4,321 tokens/s, no padding" in lines
    assert "held-out rows (losses on val, 50 answers on test) before after" in lines
    assert "loss 2.0000 0.1000" in lines
    assert "exact match 2.0% 96.0%" in lines
    assert "adapter runs/demo/adapter" in lines
    assert "next make infer" in lines
    assert "make merge" in lines


@pytest.mark.parametrize(
    ("step", "checkpoint", "line"),
    [
        (
            800,
            "runs/demo/checkpoints/checkpoint-800",
            "weights of step 800 of 1,200, the best on held-out rows",
        ),
        (1200, None, "weights of step 1,200, the last"),
        (None, None, None),  # a run of an earlier version
    ],
)
def test_closing_screen_says_of_which_step_the_weights_are(step, checkpoint, line):
    summary = SUMMARY | {"weights_step": step, "best_checkpoint": checkpoint}
    lines = lines_of(summary)
    assert [found for found in lines if found.startswith("weights of")] == ([line] if line else [])


@pytest.mark.parametrize(
    ("saved", "line"),
    [
        (("bfloat16", "bfloat16", True), "weights saved in bfloat16, the type of the base"),
        (("float32", "float32", False), "weights saved in float32, as set by output.dtype"),
        (
            ("float32", "float16", True),
            "weights saved in float32, since one overflows float16, the type of the base",
        ),
    ],
)
def test_closing_screen_says_in_which_type_a_whole_model_was_saved(saved, line):
    summary = SUMMARY | {"saved": dict(zip(("dtype", "asked", "of_base"), saved, strict=True))}
    lines = lines_of(summary)
    assert line in lines
    assert "weights saved" not in shown(closing_screen(SUMMARY | {"saved": None}, [], {}, []))


def test_closing_screen_says_what_a_server_of_an_adapter_must_be_told():
    summary = SUMMARY | {"stop_tokens": {"<|im_end|>": 7}}
    text = " ".join(shown(closing_screen(summary, [], {}, [])).split())
    assert "to serve it tell the server to stop at <|im_end|> (token 7): the base does not" in text
    assert "to serve it" not in shown(closing_screen(SUMMARY | {"stop_tokens": {}}, [], {}, []))


def test_closing_screen_without_generated_answers_still_shows_the_loss():
    text = shown(closing_screen(SUMMARY, [], {}, []))
    assert "perplexity" in text
    assert "exact match" not in text


def test_closing_screen_of_a_run_without_validation_rows_says_what_it_has():
    text = shown(
        closing_screen({"status": "done", "eval": {"before": None, "after": None}}, [], {}, ["make infer"])
    )
    assert "held-out" not in text
    assert "n/a" in text


def test_a_resumed_run_says_of_which_steps_its_time_is():
    resumed = SUMMARY | {"resumed_step": 400}
    assert any(line.startswith("done: trained for 1 min 40 s from step 400 on") for line in lines_of(resumed))
    assert training_time(resumed) == "1 min 40 s from step 400 on"
    assert training_time(SUMMARY | {"resumed_step": 0}) == training_time(SUMMARY) == "1 min 40 s"
    assert training_time({}) == "n/a"


def test_answers_that_should_call_tools_are_counted_and_have_a_score():
    before = {"answered_rows": 12, "split": "val", "tool_calls": 0.0, "tool_calls_rows": 6}
    lines = lines_of(SUMMARY | {"eval": {"before": before, "after": before | {"tool_calls": 0.5}}})
    assert "held-out rows (12 answers on val, 6 of which should call tools) before after" in lines
    assert "tool calls right 0.0% 50.0%" in lines
