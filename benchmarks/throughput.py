"""Measures training speed against TRL's SFTTrainer: tokens per second, MFU and peak memory.

    make bench-gpu                                     # on a CUDA machine, under nine minutes
    make bench-gpu ARGS="--device cpu --quick"         # the same program with a tiny model

The first form writes benchmarks/results/throughput_gpu.json, the second one writes nothing.

A run is a few optimizer steps over rows of mixed lengths. "sft-play" is our trainer with the plan that the
planner makes for the device; "trl" is SFTTrainer with its defaults (precision, checkpointing, padding and
attention) and with the same weights, adapters, rows, effective batch and maximum length. Both sides
alternate, each in a process of its own; neither the first step nor padding is counted.
Weights are random and created on the device. MFU
relates the arithmetic of one forward and one backward pass to the dense 16-bit peak of the data sheet
(configs/hardware.yaml). Measurements are logged one by one: run the same command again to continue an
interrupted benchmark.

Until benchmarks/results/throughput_gpu.json exists, there are no GPU results.
"""

import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # as in training, for both sides

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, TrainerCallback

from benchmarks.alone import figure
from benchmarks.device_meter import STEP_ERRORS, empty_device
from benchmarks.gpu_cases import Target, architecture
from benchmarks.measurement_log import MeasurementLog, write_result
from benchmarks.random_models import random_base, random_model
from benchmarks.sizing_gpu import arguments, local_device, local_target, results_of
from benchmarks.throughput_sides import CHOICES, result_table, sides, summary
from sft_play.builtin.models import byte_level_tokenizer
from sft_play.config.load import ResolvedConfig
from sft_play.config.schema import (
    DataConfig,
    LoraSettings,
    ModelConfig,
    OutputConfig,
    RunConfig,
    TrainConfig,
    TuningConfig,
)
from sft_play.data.prepare import PreparedData
from sft_play.data.stats import SPLITS
from sft_play.job import Job
from sft_play.machine.gpus import detect
from sft_play.model.architecture.shape import flop_sizes, flops_per_token
from sft_play.plan import Plan
from sft_play.planning.planner import fastest_plan
from sft_play.planning.request import Request
from sft_play.planning.rows.facts import DataFacts
from sft_play.planning.speed.devices import peak_flops
from sft_play.runlog import open_run
from sft_play.sizing.facts.architecture import Architecture
from sft_play.train.memory_meter import MemoryMeter
from sft_play.train.rows import training_rows
from sft_play.train.session import open_session
from sft_play.ui.console import console, quiet_libraries
from sft_play.units import format_bytes

BASELINE_ROWS = 2  # micro-batch of the TRL side, as in TRL's examples
RANK = 16
FINISHING_S = 5
TAKES_S = {"compiled": 120, "float8": 120}  # where there is less time, others are timed; 100 s on an H200


@dataclass(frozen=True)
class Course:
    """A training run that both sides do."""

    name: str
    model: str
    mode: str
    packing: bool  # on our side; the TRL side pads
    max_seq_len: int = 2048
    rows: int = 16  # per optimizer step
    steps: int = 5
    median_tokens: int = 350  # per row; lengths are log-normal


# What counts most comes first: what a run on one GPU usually is.
COURSES = (
    Course("LoRA 8B, packed", "Llama-3.1-8B", "lora", True),
    Course("QLoRA 8B, packed", "Llama-3.1-8B", "qlora", True),
    Course("full 1.5B, packed", "Qwen2.5-1.5B", "full", True),
    Course("full 0.5B, padded", "Qwen2.5-0.5B", "full", False),
    Course("LoRA 8B, padded", "Llama-3.1-8B", "lora", False),
)
ROUNDS = 3
QUICK = tuple(
    Course(
        f"{mode} tiny", "small-llama", mode, mode == "lora", max_seq_len=64, rows=4, steps=3, median_tokens=24
    )
    for mode in ("lora", "qlora", "full")
)


def make_rows(course: Course, vocabulary: int) -> Dataset:
    """Random tokens, as many rows as the run needs; the same on both sides and in each round."""
    draw = np.random.default_rng(0)
    count = course.rows * course.steps
    lengths = np.clip(
        draw.lognormal(np.log(course.median_tokens), 0.8, count), 16, course.max_seq_len
    ).astype(int)
    ids = [draw.integers(0, vocabulary, length).tolist() for length in lengths]
    return Dataset.from_dict(
        {"input_ids": ids, "labels": [[-100, *row[1:]] for row in ids], "length": lengths.tolist()}
    )


class StepClock(TrainerCallback):
    """Measures the seconds of each optimizer step; synchronizes the device before and after."""

    def __init__(self, device: torch.device):
        self.seconds: list[float] = []
        self._synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        self._began = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts the clock."""
        self._synchronize()
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stops the clock."""
        self._synchronize()
        self.seconds.append(time.perf_counter() - self._began)


@dataclass(frozen=True)
class Started:
    """A side that is ready to train."""

    trainer: Any
    tokens_per_step: list[int]  # padding not counted
    settings: dict[str, Any]


def run_config(course: Course, rows: Dataset, folder: Path, **choice: dict[str, Any]) -> RunConfig:
    """The config that a user would write, with a `choice` of settings by section.

    A packed step has as many tokens as the average padded one.
    """
    mean = sum(rows["length"]) / len(rows)
    packed = max(1, round(course.rows * mean / course.max_seq_len)) * course.max_seq_len
    return RunConfig(
        model=ModelConfig(name=course.model, max_seq_len=course.max_seq_len, **choice.get("model", {})),
        data=DataConfig(train_path="none"),
        tuning=_tuning(course),
        train=TrainConfig(
            effective_batch_size=packed if course.packing else course.rows,
            packing=course.packing,
            max_steps=course.steps,
            report_to=[],
            **choice.get("train", {}),
        ),
        output=OutputConfig(dir=str(folder), dtype="float32"),  # auto asks the base, which is no folder
    )


def _tuning(course: Course) -> TuningConfig:
    return TuningConfig(
        mode=course.mode, lora=LoraSettings() if course.mode == "full" else LoraSettings(r=RANK)
    )


def our_plan(course: Course, config: RunConfig, data: PreparedData) -> Plan:
    """The plan that the planner chooses for this machine."""
    model = Architecture.of(architecture(course.model))
    return fastest_plan(Request(config, model, DataFacts.of(data, config), detect(), 1))


def prepared(course: Course, rows: Dataset, folder: Path) -> PreparedData:
    """The rows in the form that the trainer takes."""
    return PreparedData(
        train=rows,
        val=None,
        test=None,
        max_seq_len=course.max_seq_len,
        stats=dict.fromkeys(SPLITS),
        cache_path=folder,
    )


def our_side(
    course: Course,
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    device: torch.device,
    **choice: dict[str, Any],
) -> Started:
    """Our trainer with the plan for this machine.

    Args:
        course: the run.
        rows: the training rows.
        tokenizer: any tokenizer; the rows are already tokenized.
        folder: for output.
        device: the device.
        choice: settings by section.
    """
    config, data = run_config(course, rows, folder, **choice), prepared(course, rows, folder)
    plan = our_plan(course, config, data)
    run = open_run(str(folder), "ours")
    job = Job(
        ResolvedConfig(config, {}, folder), run, architecture(course.model), tokenizer, data, detect(), plan
    )
    chosen = training_rows(
        rows,
        plan,
        seed=0,
        hidden_size=architecture(course.model).get_text_config().hidden_size,
        pad_id=tokenizer.pad_token_id,
    )
    model = random_model(architecture(course.model), plan, config.tuning, device)
    session = open_session(job, model, chosen, MemoryMeter.start(plan.device))
    return Started(session.trainer, chosen.tokens_per_step, plan.to_json()["plan"])


def trl_side(
    course: Course, rows: Dataset, tokenizer: PreTrainedTokenizerBase, folder: Path, device: torch.device
) -> Started:
    """TRL's trainer with its defaults; the rows are random, so they need no shuffling.

    Args:
        course: the run.
        rows: the training rows.
        tokenizer: any tokenizer; the rows are already tokenized.
        folder: for output.
        device: the device.
    """
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    settings = dict(
        per_device_train_batch_size=BASELINE_ROWS,
        gradient_accumulation_steps=course.rows // BASELINE_ROWS,
        max_steps=course.steps,
        max_length=course.max_seq_len,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        use_cpu=device.type == "cpu",
    )
    dtype = "float32" if course.mode == "full" or device.type == "cpu" else "bfloat16"
    model = random_base(
        architecture(course.model),
        dtype=dtype,
        attn_implementation="sdpa",
        device=device,
        quantize=course.mode == "qlora",
    )
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = SFTTrainer(
        model,
        args=SFTConfig(output_dir=str(folder), **settings),
        train_dataset=rows.select_columns(["input_ids"]),
        processing_class=tokenizer,
        peft_config=None if course.mode == "full" else lora,
    )
    tokens = np.array(rows["length"]).reshape(course.steps, -1).sum(axis=1)
    used = {
        name: getattr(trainer.args, name)
        for name in ("bf16", "gradient_checkpointing", "optim", "loss_type", "packing")
    }
    return Started(trainer, tokens.tolist(), settings | {"dtype": dtype, "attention": "sdpa"} | used)


def measure_side(course: Course, side: str, device: torch.device) -> dict[str, Any]:
    """Trains one side once."""
    start: Callable[..., Started] = trl_side if side == "trl" else partial(our_side, **CHOICES.get(side, {}))
    empty_device(device)
    tokenizer = byte_level_tokenizer([], 300, course.max_seq_len)
    rows = make_rows(course, architecture(course.model).vocab_size)
    with tempfile.TemporaryDirectory() as folder, quiet_libraries(Path(folder) / "log.txt"):
        meter, clock = MemoryMeter.start(device.type), StepClock(device)
        try:
            started = start(course, rows, tokenizer, Path(folder), device)
            started.trainer.add_callback(clock)
            started.trainer.train()
        except STEP_ERRORS as error:
            return {"problem": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
    seconds, tokens = sum(clock.seconds[1:]), sum(started.tokens_per_step[1:])
    return {
        "problem": None,
        "tokens": tokens,
        "step_seconds": [round(one, 4) for one in clock.seconds],
        "tokens_per_second": tokens / seconds,
        "mfu": _mfu(course, rows, tokens / seconds, device),
        # On the CPU, the process keeps memory that the other side used.
        "peak_bytes": meter.peak_bytes() if device.type == "cuda" else None,
        "reserved_bytes": torch.cuda.max_memory_reserved() if device.type == "cuda" else None,
        "settings": started.settings,
    }


def _mfu(course: Course, rows: Dataset, tokens_per_second: float, device: torch.device) -> float | None:
    """Model FLOPs utilization; None if the device's peak is unknown."""
    peak = peak_flops(detect()) if device.type == "cuda" else None
    if peak is None:
        return None
    config = run_config(course, rows, Path())
    sizes = flop_sizes(architecture(course.model), config)
    return tokens_per_second * flops_per_token(sizes, round(sum(rows["length"]) / len(rows))) / peak


def turn(course: str, side: str, device_type: str) -> dict[str, Any]:
    """`measure_side` for a process of its own."""
    warnings.simplefilter("ignore")
    (found,) = (each for each in (*COURSES, *QUICK) if each.name == course)
    return measure_side(found, side, torch.device(device_type))


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if a run failed."""
    started = time.monotonic()
    parser = arguments(__doc__, 9.0)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    args = parser.parse_args(argv)
    device, results = local_device(args), results_of(args)
    lines = MeasurementLog(results / f"throughput_{device.type}.lines.jsonl", device)
    turns = all_turns(local_target(device), args.rounds, QUICK if args.quick else COURSES)
    done = {(line["round"], line["course"], line["side"]) for line in lines.read()}
    deadline = started + 60 * args.minutes - FINISHING_S
    for number, course, side in (each for each in turns if each not in done):
        if time.monotonic() + TAKES_S.get(side, 0) > deadline:
            continue  # a quicker one may still have the time
        found = figure("benchmarks.throughput:turn", course, side, device.type, deadline=deadline)
        if found is None:
            break
        lines.add({"round": number, "course": course, "side": side, **found})
        peak = f", peak {format_bytes(found['peak_bytes'])}" if found.get("peak_bytes") else ""
        result = found["problem"] or f"{found['tokens_per_second']:,.0f} tokens/s{peak}"
        console().print(f"round {number} {course:20} {side:10} {result}", highlight=False, markup=False)
    rows = lines.read()
    medians = summary(rows)
    console().print(result_table(medians, lines.made["made_on"].get("gpu", "the CPU")))
    path = results / "throughput_gpu.json"
    head = {"what": (__doc__ or "").splitlines()[0], **lines.made, "summary": medians}
    write_result(path, head, {"turns": rows})
    console().print(f"wrote {path}")
    if len(rows) < len(turns):
        console().print(f"{len(rows)} of {len(turns)} turns are done; run the same command again to continue")
        return 0
    if args.rounds == ROUNDS:
        lines.path.unlink()
    return 1 if any(row["problem"] for row in rows) else 0


def all_turns(
    target: Target, rounds: int = ROUNDS, courses: Sequence[Course] = COURSES
) -> list[tuple[int, str, str]]:
    """Round, course and side of everything that is to be timed, in order."""
    return [
        (number, course.name, side)
        for number, course in product(range(rounds), courses)
        for side in sides(target.kind, course.mode, target.compute_capability)
    ]


if __name__ == "__main__":
    sys.exit(main())
