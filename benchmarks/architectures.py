"""Trains every causal language model that transformers can build for two steps, or shows why not.

    make bench-models                       # all: results/models_cpu.json and docs/reference/models.md
    make bench-models ARGS="llama gpt_oss"  # only these, the others stay as they are

Each architecture is built small, with random weights, saved, planned, loaded and trained as in a run. Then
its peak memory is predicted by a trace and measured by the allocator's own events.
"""

import argparse
import copy
import json
import random
import re
import statistics
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    IntervalStrategy,
    PretrainedConfig,
)
from transformers.utils.logging import disable_progress_bar

from benchmarks.cpu_meter import measure_step
from benchmarks.measurement_log import RESULTS, made_on, versions, write_result
from benchmarks.miniatures import POSITIONS, VOCABULARY, architectures, miniature
from sft_play.builtin.models import byte_level_tokenizer
from sft_play.config.load import ResolvedConfig
from sft_play.config.schema import RunConfig
from sft_play.data.prepare import PreparedData
from sft_play.data.stats import SPLITS
from sft_play.errors import ConfigError, SftPlayError, UntraceableModel
from sft_play.job import Job
from sft_play.machine.gpus import detect
from sft_play.model.architecture.shape import know_multimodal, require_decoder
from sft_play.model.build import build_model
from sft_play.model.load import load_model_config, load_tokenizer
from sft_play.planning.allowed import allowed_plans
from sft_play.planning.request import Request
from sft_play.planning.rows.facts import DataFacts
from sft_play.planning.search.choice import choose_plan
from sft_play.runlog import open_run
from sft_play.sizing.facts.architecture import Architecture
from sft_play.sizing.step import JoinedRows, PaddedRows, StepSpec
from sft_play.sizing.trace.trace import trace_step
from sft_play.train.session import prepare_session
from sft_play.ui.console import console, quiet_libraries

ROWS, LONGEST = 12, 40  # of the data
STEP_TOKENS = 32  # in each of the 4 rows of the step whose memory is measured
# Rows that are shorter than a block of its compressor leave weights without gradients.
STEP_TOKENS_OF = {"deepseek_v4": 160}
WAYS: dict[str, dict[str, Any]] = {
    "lora": {"tuning": {"mode": "lora", "lora": {"r": 4}}},
    "packed": {"tuning": {"mode": "lora", "lora": {"r": 4}}, "train": {"packing": True}},
    "qlora": {"tuning": {"mode": "qlora", "lora": {"r": 4}}},
    "full": {"tuning": {"mode": "full"}},
}


RESULT = RESULTS / "models_cpu.json"
GUIDE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "models.md"
GUIDE_TEXT = """# Which models train

`make bench-models` writes this page. It builds all causal language models that `transformers` knows, and
multimodal ones that people train on text, small with random weights, then plans, loads and trains each for
two steps on a CPU: {found}. Other multimodal models may train too.

- **yes**: it trained. A percentage is the error of the predicted peak memory, where it is not 0.00%. Such
  small models have peaks of a few megabytes, so a few kilobytes are a large share.
- **packed**: LoRA with `train.packing=true`, which joins rows end to end. Models that would mix joined rows
  are refused: "boundaries" means that the model does not pass on where a row ends; otherwise the cell names
  the layers that would mix rows. Without packing, their rows are padded.
- **experts 46%**: QLoRA is refused, because 46% of the weights are fused experts, which would stay in 16 bit.
- **no forecast**: what the step computes depends on the data, so it cannot be traced; the probe measures its
  memory.
- **no**: refused for the reason in the notes.

{errors}

Adapters on fused experts are saved in the layout that vLLM reads for models whose experts it keeps fused as
well (gpt-oss, Qwen3.5 MoE). For others, and to be sure, serve the merged model: `make merge`.

| `model_type` | LoRA | packed | QLoRA | full | notes |
|---|---|---|---|---|---|
{rows}

## Refused, and why

| reason | `model_type` |
|---|---|
{refused}
{unbuilt}"""
UNBUILT_TEXT = """
## Not built

Their default config cannot be made small, or needs further packages. They may train.

| `model_type` | what transformers said |
|---|---|
{rows}
"""
# Refusals that many models have in common, and what stands for them in the table.
SHORT = (
    (re.compile(r"(\d+%) of the weights of \w+ are fused experts"), "experts {0}"),
    (re.compile(r"but layers of type ([\w, ]+) would mix them"), "{0}"),
    (re.compile(r"passes no row boundaries to its attention"), "boundaries"),
)


@dataclass(frozen=True)
class Outcome:
    """What became of one architecture in one way of training."""

    model_type: str
    way: str
    trained: bool
    refusal: str = ""  # the first line of the message
    crashed: bool = False  # with an error that is no refusal in words
    attention: str = ""
    joined: bool = False
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    traceable: bool = True  # as far as it was tried

    @property
    def error(self) -> float | None:
        """Relative error of the predicted peak; positive if it is too high."""
        if self.predicted_bytes is None or self.measured_bytes is None:
            return None
        return self.predicted_bytes / self.measured_bytes - 1


def save_miniature(model_type: str, folder: Path) -> None:
    """Saves a small model with random weights, and a tokenizer of bytes.

    Raises:
        Exception: transformers cannot build it from this config, or not without a further package.
    """
    torch.manual_seed(0)
    config = miniature(model_type)
    config.save_pretrained(folder)  # also if there is no model
    byte_level_tokenizer([], VOCABULARY, POSITIONS).save_pretrained(folder)
    random_model(config).save_pretrained(folder)
    config.save_pretrained(folder)  # as published, also if the model is only a part of it


def random_model(config: PretrainedConfig) -> Any:
    """The model as it is published: with its vision tower, if this can be built here."""
    if type(config) in AutoModelForImageTextToText._model_mapping:
        with suppress(Exception):  # a further package, or more settings than those of the text
            return AutoModelForImageTextToText.from_config(copy.deepcopy(config))
        know_multimodal(config)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config))


def random_rows(count: int, seed: int) -> Dataset:
    """Tokenized rows: a prompt that is not learned, then an answer that is."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        ids = [rng.randrange(7, 250) for _ in range(rng.randint(LONGEST // 2, LONGEST))]
        prompt = len(ids) // 2
        rows.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:], "length": len(ids)})
    return Dataset.from_list(rows)


def make_job(model: Path, output: Path, way: str) -> Job:
    """A job of two steps with two micro-batches each.

    Raises:
        SftPlayError: this way of training is refused for this model.
    """
    tree = WAYS[way]
    packed = tree.get("train", {}).get("packing", False)
    train_settings = {
        "max_steps": 2,
        "batch_size": 2 * LONGEST if packed else 2,
        "grad_accum": 2,
        "probe": False,
        "logging_steps": 1,
        "report_to": [],
        "gradient_checkpointing": False,
    }
    config = RunConfig.model_validate(
        {
            "model": {"name": str(model), "max_seq_len": LONGEST},
            "data": {"train_path": "generated"},
            "tuning": tree["tuning"],
            "train": train_settings | tree.get("train", {}),
            "parallel": {"memory_gib": 4},
            "output": {"name": way, "dir": str(output)},
        }
    )
    rows, held_out = random_rows(ROWS, 0), random_rows(2, 1)
    data = PreparedData(rows, held_out, None, LONGEST, dict.fromkeys(SPLITS), output)
    architecture, machine = load_model_config(config.model), detect()
    facts = DataFacts.of(data, config)
    drafts, _ = allowed_plans(Request(config, Architecture.of(architecture), facts, machine, 1))
    plan, _ = choose_plan(config, drafts, None, None)
    run, tokenizer = open_run(str(output), way, 0), load_tokenizer(config.model)
    return Job(ResolvedConfig(config, {}, Path("bench")), run, architecture, tokenizer, data, machine, plan)


def run_two_steps(job: Job) -> None:
    """Loads the model and trains it with the trainer of a run, but saves and evaluates nothing.

    Raises:
        SftPlayError: a check before the first step fails.
    """
    trainer = prepare_session(job, announce=False).trainer
    args = trainer.args
    args.save_strategy = args.eval_strategy = IntervalStrategy.NO
    args.eval_on_start = args.load_best_model_at_end = False
    trainer.train()


def step_of(job: Job) -> StepSpec:
    """A step as in the job, at a fixed shape."""
    tokens = STEP_TOKENS_OF.get(job.architecture.model_type, STEP_TOKENS)
    spec = StepSpec.of(job.config, job.plan)
    return replace(
        spec,
        batch=JoinedRows(4 * tokens) if spec.joined else PaddedRows(4, tokens),
        longest=tokens,
        sequence_tokens=None,
        supervised_share=1.0,
        eval_batch=None,
    )


def peaks(job: Job) -> tuple[int, int] | tuple[None, None]:
    """Predicted and measured peak bytes of a step; nothing if the model is not traceable."""
    spec = step_of(job)
    try:
        traced = trace_step(job.architecture, spec).step.peaks()
    except UntraceableModel:
        return None, None
    measured = measure_step(build_model(job.config, job.plan), replace(spec, cut_at_longest=spec.joined))
    return max(peak.bytes for phase, peak in traced.items() if phase in measured.phases), measured.peak


def try_way(model_type: str, model: Path, output: Path, way: str, *, measure: bool = True) -> Outcome:
    """Trains two steps, or says what the refusal says; packed rows have the memory of joined ones."""
    try:
        job = make_job(model, output, way)
        with quiet_libraries(output / "log.txt"):
            run_two_steps(job)
        sized = measure and way != "packed"
        predicted, measured = peaks(job) if sized else (None, None)
    except SftPlayError as error:
        reason = str(error).splitlines()[0].replace(str(model), "the model")
        return Outcome(model_type, way, trained=False, refusal=reason)
    except Exception as error:  # what the walk is there to find
        return Outcome(
            model_type, way, trained=False, refusal=f"{type(error).__name__}: {error}", crashed=True
        )
    plan = job.plan
    traceable = not sized or predicted is not None
    found = (plan.kernels.attention, plan.rows.joined, predicted, measured, traceable)
    return Outcome(model_type, way, True, "", False, *found)


def walk(names: list[str], ways: Iterable[str] = tuple(WAYS), *, measure: bool = True) -> Iterator[Outcome]:
    """The outcome of each way of each architecture; one with the way "build" if it cannot be built here."""
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            model, output = Path(folder) / "model", Path(folder) / "runs"
            try:
                save_miniature(name, model)
            except Exception as error:  # of transformers, about a config that it made itself
                yield _not_built(name, model, error)
                continue
            for way in ways:
                yield try_way(name, model, output, way, measure=measure)


def _not_built(name: str, folder: Path, error: Exception) -> Outcome:
    """The outcome of an architecture that is refused for its config alone, or could not be built."""
    reason, way = (str(error).strip() or type(error).__name__).splitlines()[0], "build"
    if (folder / "config.json").is_file():
        try:
            require_decoder(AutoConfig.from_pretrained(folder))
        except ConfigError as refusal:
            reason, way = str(refusal).splitlines()[0], "lora"
    return Outcome(name, way, trained=False, refusal=reason)


def read_outcomes() -> list[Outcome]:
    """The outcomes in the result file; none if there is no such file."""
    if not RESULT.is_file():
        return []
    return [Outcome(**entry) for entry in json.loads(RESULT.read_text(encoding="utf-8"))["outcomes"]]


def write(outcomes: list[Outcome]) -> None:
    """Writes the result file and the table in docs/."""
    head = {
        "what": "Every causal language model that transformers can build, trained for two steps on the CPU",
        "made_on": made_on(torch.device("cpu")),
        "versions": versions(),
    }
    write_result(RESULT, head, {"outcomes": [asdict(outcome) for outcome in outcomes]})
    GUIDE.write_text(guide(outcomes), encoding="utf-8")


def guide(outcomes: list[Outcome]) -> str:
    """docs/reference/models.md."""
    by_type: dict[str, dict[str, Outcome]] = {}
    for outcome in outcomes:
        by_type.setdefault(outcome.model_type, {})[outcome.way] = outcome
    unbuilt = []
    trained: dict[str, list[str]] = {}  # names by the cells that they share
    refused: dict[str, list[str]] = {}
    for name, ways in by_type.items():
        if "build" in ways:
            unbuilt.append(f"| {name} | {_cell(ways['build'].refusal)} |")
        elif not any(outcome.trained for outcome in ways.values()):
            reason = _cell(ways["lora"].refusal).partition("; SFT-Play trains")[0]
            refused.setdefault(reason.replace(f"{name} ", "", 1), []).append(name)
        else:
            cells = f"{' | '.join(_mark(ways[way]) for way in WAYS)} | {_notes(ways)} |"
            trained.setdefault(cells, []).append(name)
    count, many = (sum(map(len, groups.values())) for groups in (refused, trained))
    found = f"{many} train, {count} are refused with a reason, {len(unbuilt)} were not built"
    missing = sorted(set(architectures()) - set(by_type))
    if missing:
        found += f"; not walked yet: {', '.join(missing)}"
    rows = [f"| {', '.join(names)} | {cells}" for cells, names in trained.items()]
    reasons = [f"| {reason} | {', '.join(names)} |" for reason, names in sorted(refused.items())]
    return GUIDE_TEXT.format(
        found=found,
        errors=_errors(outcomes),
        rows="\n".join(rows),
        refused="\n".join(reasons),
        unbuilt=UNBUILT_TEXT.format(rows="\n".join(unbuilt)) if unbuilt else "",
    )


def _errors(outcomes: list[Outcome]) -> str:
    """A sentence on how far the predicted peaks are off."""
    errors = {each: abs(each.error) for each in outcomes if each.error is not None}
    if not errors:
        return "No peak was measured."
    worst = max(errors, key=errors.__getitem__)
    return (
        f"Of {len(errors)} peaks, {sum(error <= 0.001 for error in errors.values())} are within 0.1% of the "
        f"prediction; median {statistics.median(errors.values()):.4%}, worst {errors[worst]:.2%} "
        f"({worst.model_type}, {worst.way})."
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").removeprefix("model.name: ")


def _mark(outcome: Outcome) -> str:
    if not outcome.trained:
        return "**fails**" if outcome.crashed else _short(outcome.refusal) or "no"
    if not outcome.traceable:
        return "yes, no forecast"
    return "yes" if abs(outcome.error or 0) < 5e-5 else f"yes, {outcome.error:+.2%}"


def _short(refusal: str) -> str:
    """What stands for a refusal that many models have in common; empty for others."""
    found = ((pattern.search(refusal), words) for pattern, words in SHORT)
    return next((words.format(*match.groups()) for match, words in found if match), "")


def _notes(ways: dict[str, Outcome]) -> str:
    """Refusals without the name, so that models that share one share a row."""
    refused = [each for each in ways.values() if not each.trained and not _short(each.refusal)]
    texts = (_cell(each.refusal).replace(f": {each.model_type} ", ": ", 1) for each in refused)
    return "; ".join(dict.fromkeys(texts))


def line(outcome: Outcome) -> str:
    """An outcome in one line."""
    if not outcome.trained:
        mark = "fails" if outcome.crashed else "no"
        return f"{outcome.model_type:24} {outcome.way:6} {mark}  {outcome.refusal.splitlines()[0]}"
    error = "" if outcome.error is None else f"peak {outcome.error:+.3%}"
    joined = "joined" if outcome.joined else "padded"
    return f"{outcome.model_type:24} {outcome.way:6} yes  {outcome.attention:12} {joined}  {error}"


def main() -> int:
    """Runs the benchmark; returns 1 if something failed without a refusal in words."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="architectures; default: all")
    parser.add_argument(
        "--no-memory", action="store_true", help="do not measure, which takes half of the time"
    )
    args = parser.parse_args()
    names = args.names or list(architectures())
    warnings.simplefilter("ignore")
    disable_progress_bar()
    outcomes = [outcome for outcome in read_outcomes() if outcome.model_type not in names]
    for outcome in walk(names, measure=not args.no_memory):
        outcomes.append(outcome)
        console().print(line(outcome), highlight=False, soft_wrap=True)
        if outcome.way in ("build", "full"):
            write(sorted(outcomes, key=lambda each: each.model_type))
    return 1 if any(outcome.crashed for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
