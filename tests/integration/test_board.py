"""TensorBoard's files, read back as TensorBoard reads them."""

import html
import re
import time
from dataclasses import replace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from sft_play.runlog import read_metrics
from sft_play.train.run import train
from sft_play.train.trackers import _literal, show_answers
from tests.conftest import token_rows
from tests.jobs import make_job

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]

SETTINGS = dict(max_steps=6, save_steps=2, eval_steps=2, batch_size=4, report_to=["tensorboard"])


def board_of(job) -> EventAccumulator:
    return EventAccumulator(str(job.run.tensorboard), size_guidance={"tensors": 0}).Reload()


def texts(board) -> dict[str, list[tuple[int, str]]]:
    return {
        tag.removesuffix("/text_summary"): [
            (event.step, event.tensor_proto.string_val[0].decode()) for event in board.Tensors(tag)
        ]
        for tag in board.Tags()["tensors"]
    }


def shown(text: str) -> str:
    """A text as TensorBoard shows it, in one line."""
    page = markdown_to_safe_html(text)
    assert "<pre" not in page  # in which long lines are cut off
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).split())


@pytest.fixture(scope="module")
def job(tiny_model, tmp_path_factory):
    """A run of six steps."""
    rows = token_rows(100)
    found = make_job(tiny_model, tmp_path_factory.mktemp("board"), "board", rows=rows, **SETTINGS)
    train(found)
    return found


def test_the_curves_are_in_groups_and_hold_what_was_logged(job):
    board = board_of(job)
    names = set(board.Tags()["scalars"])
    assert names >= {
        "train/loss", "train/grad_norm", "train/learning_rate", "train/epoch", "eval/loss", "eval/token_accuracy",
        "speed/tokens_per_second", "speed/data_wait", "memory/peak_gib", "train/supervised_tokens",
    }  # fmt: skip
    assert {name.partition("/")[0] for name in names} == {"train", "eval", "speed", "memory"}
    assert min(names) == "eval/loss"  # TensorBoard shows tags in this order: a loss is on its first screen
    logged = [record for record in read_metrics(job.run) if "train/loss" in record]
    for name in ("train/loss", "train/learning_rate", "speed/tokens_per_second"):
        shown = [(event.step, event.value) for event in board.Scalars(name)]
        assert [step for step, _ in shown] == [1, 2, 3, 4, 5, 6]
        assert [value for _, value in shown] == pytest.approx([record[name] for record in logged], rel=1e-5)
    assert [event.step for event in board.Scalars("eval/loss")] == [0, 2, 4, 6]
    tokens = [event.value for event in board.Scalars("train/supervised_tokens")]
    assert tokens == [record["train/supervised_tokens"] for record in logged]


def test_plan_settings_and_lengths_are_shown(job):
    board = board_of(job)
    found = texts(board)
    ((step, plan),) = found["plan"]
    assert step == 0 and all(f"- {reason}" in plan for reason in job.plan.why)
    content = board.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    values = HParamsPluginData.FromString(content).session_start_info.hparams
    assert values["effective_batch_size"].number_value == 16 and values["mode"].string_value == "lora"
    (lengths,) = board.Histograms("train/row_tokens")
    assert lengths.histogram_value.num == 100
    assert lengths.histogram_value.sum == sum(len(row["input_ids"]) for row in token_rows(100))


def test_a_resumed_run_has_one_curve(job, tiny_model):
    before = {event.step: event.value for event in board_of(job).Scalars("train/loss")}
    again = make_job(
        tiny_model,
        job.run.path.parent,
        "board",
        rows=token_rows(100),
        **{**SETTINGS, "resume": str(job.run.checkpoints / "checkpoint-4")},
    )
    train(replace(job, resolved=again.resolved))
    board = board_of(job)
    shown = [(event.step, event.value) for event in board.Scalars("train/loss")]
    assert [step for step, _ in shown] == [1, 2, 3, 4, 5, 6]  # steps 5 and 6 were trained twice
    assert dict(shown) == pytest.approx(before, rel=1e-5)
    assert [event.step for event in board.Scalars("eval/loss")] == [0, 2, 4, 6]
    assert [step for step, _ in texts(board)["plan"]] == [0, 4]
    assert len(list(job.run.tensorboard.iterdir())) == 2  # files of one run, not folders of several


def test_answers_and_their_scores_are_shown(job):
    sample = {"prompt": "# 1+1?", "reference": "2", "before": "```\n5", "after": "2"}
    scores = {
        "before": {"exact_match": 0.0, "max_new_tokens": 40},
        "after": {"exact_match": 0.5, "chrf": None},
    }
    time.sleep(1)  # event files are read in the order of their names, in which the second comes first
    show_answers(job.run, 6, [sample], scores)
    board = board_of(job)
    ((step, text),) = texts(board)["answers/1"]
    assert step == 6 and shown(text) == "prompt # 1+1? reference 2 before ``` 5 after 2"
    assert not {"score/max_new_tokens", "score/chrf"} & set(board.Tags()["scalars"])
    assert [(e.step, e.value) for e in board.Scalars("score/exact_match")] == [(0, 0.0), (6, 0.5)]
    assert len(board.Scalars("train/loss")) == 6


@pytest.mark.parametrize(
    "text",
    ["a  b", "    x = 1\n\n  y", "1. one\n2. two", "- a\n* b\n+ c", "| a | b |\n|---|---|\n| 1 | 2 |", "<b>&amp; `x` ~~~", "# h\n===",
     "![a](b)", "\\*", "***\n___", "> q", "\thello\n    tab"],
)  # fmt: skip
def test_an_answer_is_shown_as_it_is(text):
    assert shown(_literal(text)) == " ".join(text.split())
