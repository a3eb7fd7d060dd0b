"""Evaluation: loss over supervised tokens, and generated answers compared with references.

`make eval` compares the base, what was trained and, if there is one, the merged model.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import send_to_device

from sft_play.commands.answers import Scores, as_written, is_right, score_answer, summarise_answers
from sft_play.commands.judges import judged, judges
from sft_play.commands.models import merged_model, of_each_model, trained_name
from sft_play.commands.questions import Question, closing_questions, questions
from sft_play.config.inputs import asked_name
from sft_play.config.schema import EvalConfig, RunConfig
from sft_play.data.prepare import PreparedData
from sft_play.errors import ConfigError
from sft_play.files import storing, write_atomic
from sft_play.model.collators import padded_micro_batches
from sft_play.model.generation import DEFAULT_BATCH_SIZE, Answer, generate_answers, in_batches
from sft_play.model.layers.loss_head import TokenScore, add_loss_head, score_batch
from sft_play.model.load import LoadedData, load_data
from sft_play.model.weights.base_files import require_same_base
from sft_play.model.weights.finished import finished_weights
from sft_play.report.card import renewed_cards
from sft_play.report.layout import apart, ending
from sft_play.report.record import SPLITS, planned_batch
from sft_play.report.tables import evaluation_table, perplexity, samples_table
from sft_play.runlog import RunDir
from sft_play.spelling import var
from sft_play.ui.console import console, quiet_libraries
from sft_play.ui.progress import progress_bar
from sft_play.vision.prompts import NO_PICTURES, Pictures
from sft_play.vision.shown import thumbnails

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


def score_rows(
    model: torch.nn.Module,
    dataset: "Dataset",
    pad_id: int,
    *,
    batch_size: int,
    pictures: Pictures = NO_PICTURES,
    description: str = "scoring",
) -> TokenScore:
    """Loss and token accuracy over all supervised tokens of `dataset`, of a model in eval mode.

    The dataset has the columns input_ids, labels and length. The batch size, halved if memory runs out, only
    affects rounding. `pictures` are those of its rows, `description` is that of the progress bar.
    """
    add_loss_head(model)
    collate = padded_micro_batches(dataset, pad_id)
    sums = torch.zeros(3, dtype=torch.float64)
    order = sorted(range(len(dataset)), key=list(dataset["length"]).__getitem__, reverse=True)

    def score(rows: list[int]) -> torch.Tensor:
        batch = pictures.of(rows).beside(collate([{"rows": rows}]))
        return score_batch(model, send_to_device(batch, model.device)).cpu()

    with progress_bar(description, len(order)) as done:
        for rows, part in in_batches(order, batch_size, score):
            sums += part
            done(len(rows))
    return TokenScore.of(sums)


def answer_questions(
    model: torch.nn.Module,
    tokenizer: "PreTrainedTokenizerBase",
    asked: Sequence[Question],
    data: PreparedData,
    settings: EvalConfig,
    description: str,
) -> list[Answer]:
    """Generates greedy answers, in the order of the questions, which are of rows of `data`.

    `description` is that of the progress bar.
    """
    seen = [question.pictures for question in asked]
    return generate_answers(
        model,
        tokenizer,
        [question.ids for question in asked],
        max_new_tokens=settings.max_new_tokens,
        batch_size=settings.rows_answered_together,
        pictures=Pictures(data.recipe, seen),
        description=description,
    )


def answer_metrics(
    asked: Sequence[Question], answers: Sequence[Answer], settings: EvalConfig
) -> tuple[dict[str, object], list[Scores]]:
    """The metrics over all answers, as they are written, and the scores of each."""
    compared = [question.compared(answer.text) for question, answer in zip(asked, answers, strict=True)]
    scores = [score_answer(each, settings) for each in compared]
    for name, judge in judges(settings.metrics).items():
        for each, value in zip(scores, judged(name, judge, compared), strict=True):
            each[name] = value
    metrics = as_written(summarise_answers(compared, scores), settings.metrics)
    metrics["unfinished_answers"] = sum(not answer.finished for answer in answers)
    metrics["max_new_tokens"] = settings.max_new_tokens
    return metrics, scores


def samples_of(
    asked: Sequence[Question], found: Mapping[str, "Measured"], settings: EvalConfig
) -> list[dict[str, object]]:
    """The first questions with the answers of each model as they are compared, and whether they are right."""
    return [
        {
            "prompt": question.shown,
            **thumbnails(question.pictures),
            "reference": question.reference,
            **{name: question.compared(one.answers[row].text).answer for name, one in found.items()},
            "right": {name: is_right(one.judged[row], settings.metrics) for name, one in found.items()},
        }
        for row, question in enumerate(asked[: settings.samples])
    ]


def _split_rows(data: PreparedData, split: str) -> "Dataset":
    rows = {"val": data.val, "test": data.test}[split]
    if rows is None or not len(rows):
        other = next((name for name in SPLITS if name != split and getattr(data, name) is not None), None)
        raise ConfigError(
            f"{var(SPLIT=split)}: the config has no {split} rows. Set data.{split}_path or "
            f"data.{split}_fraction" + (f", or use {var(SPLIT=other)}" if other else "")
        )
    return rows


def scoring_batch_size(config: RunConfig, run: RunDir) -> int:
    """Rows per forward pass: eval.batch_size; auto is the micro-batch size of the plan."""
    if config.eval.batch_size != "auto":
        return config.eval.batch_size
    size, length, packed = planned_batch(run) or (DEFAULT_BATCH_SIZE, 1, False)
    return max(1, size // length if packed else size)


@dataclass(frozen=True)
class Measured:
    """What one model did."""

    scores: dict[str, object]  # loss and answer metrics, as eval.<split>.json has them
    answers: list[Answer]
    judged: list[Scores]  # of each answer


@dataclass(frozen=True)
class Comparison:
    """Answers to held-out rows before and after training."""

    scores: dict[str, dict[str, object]]  # by "before" and "after": the answer metrics, and the split
    samples: list[dict[str, object]]  # as `samples_of` gives them, by the same names


def evaluate_run(
    config: RunConfig, run: RunDir, split: str = "val", limit: int | None = None
) -> dict[str, Any]:
    """Evaluates base, trained and merged model of a finished run on a held-out split.

    Prints a table, and writes eval.<split>.json and .jsonl. Answers are generated for `limit` rows (default:
    eval.limit); loss and token accuracy use all rows.

    Returns:
        The scores of the trained model, and as `models` those of each.

    Raises:
        ConfigError: the split has no rows, or the metrics cannot be computed (`questions`).
        CheckpointError: the run has no complete weights.
        DoesNotFitError: memory runs out with a single row.
        StorageError: the results cannot be written.
    """
    weights = finished_weights(config, run)
    require_same_base(config.model, run)  # also after full fine-tuning: the scores of the base are beside
    with quiet_libraries(run.log):
        loaded = load_data(config, started=True)
        rows = _split_rows(loaded.rows, split)
        asked = questions(config, loaded.rows, split, loaded.tokenizer, limit)
        merged, left_out = merged_model(config, run, weights)
        measure = partial(_measure, config, scoring_batch_size(config, run), loaded, rows, asked)
        measured = of_each_model(config, weights, measure, merged)
        trained = measured[trained_name(config)]
        result = {
            "name": run.path.name,
            "split": split,
            "model": asked_name(config.model.name),
            "weights": str(weights),
            **trained.scores,
            "models": {name: one.scores for name, one in measured.items()},
            "left_out": left_out,
        }
        with renewed_cards(config, run):
            run.write_json(run.evaluation(split), result)
        answers_file = run.evaluation(split).with_suffix(".jsonl")
        _write_answers(answers_file, asked, config, measured)
        places = ending({"numbers": run.evaluation(split), "answers": answers_file}, [])
        samples = samples_of(asked, measured, config.eval)
        console().print(
            apart(evaluation_table(result), *([samples_table(samples)] if samples else []), places)
        )
    return result


def _measure(
    config: RunConfig,
    batch_size: int,
    loaded: LoadedData,
    rows: "Dataset",
    asked: Sequence[Question],
    name: str,
    model: torch.nn.Module,
) -> Measured:
    """Scores a model on all rows, and its answers to the questions."""
    began = time.perf_counter()
    tokenizer, data = loaded.tokenizer, loaded.rows
    pictures = Pictures.in_rows(data.recipe, rows, data.cache_path)
    how: dict[str, Any] = dict(pictures=pictures, batch_size=batch_size, description=f"{name}: scoring rows")
    score = score_rows(model, rows, tokenizer.pad_token_id, **how)
    answers = answer_questions(model, tokenizer, asked, data, config.eval, f"{name}: answering rows")
    seconds = time.perf_counter() - began
    metrics, judged = answer_metrics(asked, answers, config.eval) if asked else ({"answered_rows": 0}, [])
    in_4bit = " on 4-bit weights" if getattr(model, "is_loaded_in_4bit", False) else ""
    scores = {
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch.") + in_4bit,
        "rows": len(rows),
        "supervised_tokens": score.tokens,
        "loss": score.loss,
        "perplexity": perplexity(score.loss),
        "token_accuracy": score.accuracy,
        **metrics,
        "seconds": round(seconds, 3),
    }
    return Measured(scores, answers, judged)


def _write_answers(
    path: Path, asked: Sequence[Question], config: RunConfig, measured: Mapping[str, Measured]
) -> None:
    """Writes a line for each question: the answer of the trained model, its scores, and the other answers."""
    lines, trained, metrics = "", trained_name(config), config.eval.metrics
    names = {name: "generated" if name == trained else name for name in measured}
    for row, question in enumerate(asked):
        answer = measured[trained].answers[row]
        record = {
            "messages": list(question.messages),
            "reference": question.reference,
            "generated": answer.text,
            "finished": answer.finished,
            "tokens": answer.tokens,
            **as_written(measured[trained].judged[row], metrics),
        }
        record |= {key: measured[name].answers[row].text for name, key in names.items()}
        right = {key: is_right(measured[name].judged[row], metrics) for name, key in names.items()}
        record |= {"right": right, **(thumbnails(question.pictures) if row < config.eval.samples else {})}
        lines += json.dumps(record, ensure_ascii=False) + "\n"
    with storing(path, "Free some space, or set output.dir=<folder>"):
        write_atomic(path, lines)


def before_after(
    config: RunConfig, run: RunDir, data: PreparedData, tokenizer: "PreTrainedTokenizerBase"
) -> Comparison | None:
    """Compares generated answers before and after training, on at most eval.limit rows of test (else val).

    None if no held-out row has an answer.
    """
    split, asked = closing_questions(config, data, tokenizer)
    if not asked:
        return None

    def measure(name: str, model: torch.nn.Module) -> Measured:
        answers = answer_questions(model, tokenizer, asked, data, config.eval, f"{name}: answering {split}")
        metrics, judged = answer_metrics(asked, answers, config.eval)
        return Measured({**metrics, "split": split}, answers, judged)

    found = of_each_model(config, finished_weights(config, run), measure).values()
    when = dict(zip(("before", "after"), found, strict=True))
    scores = {name: one.scores for name, one in when.items()}
    return Comparison(scores, samples_of(asked, when, config.eval))
