"""A tiny run, trained for real in a second: what evaluation, inference and merging start from."""

import json
import random
import shutil
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file

from sft_play.config.schema import RunConfig
from sft_play.data.prepare import prepare
from sft_play.model.adapters.attach import attach_adapter
from sft_play.model.build import load_base
from sft_play.model.load import load_tokenizer
from sft_play.runlog import RunDir

ROWS = 24


class FinishedRun(NamedTuple):
    config: RunConfig
    run: RunDir


def question_rows(seed: int = 0) -> list[dict]:
    """Questions of two words, each with an answer of one to three words that can only be learned by heart."""
    rng = random.Random(seed)
    questions = rng.sample([(a, b) for a in range(8) for b in range(8)], ROWS)
    answers = [" ".join(f"w{rng.randrange(40, 60)}" for _ in range(rng.randint(1, 3))) for _ in questions]
    return [
        {"question": f"w{a} w{b + 20}", "answer": text}
        for (a, b), text in zip(questions, answers, strict=True)
    ]


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def decisive_model(model: Path, folder: Path) -> Path:
    """The tiny model with a larger output head: a frozen small one caps any adapter's confidence."""
    copy = folder / "base"
    shutil.copytree(model, copy)
    weights = load_file(copy / "model.safetensors")
    weights["lm_head.weight"] *= 20
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def make_config(model: Path, folder: Path, mode: str = "lora", **evaluation) -> RunConfig:
    """A run on `model` in `folder`; what it is tested with is what it is trained with."""
    data = write_rows(folder / "rows.jsonl", question_rows())
    return RunConfig.model_validate(
        {
            "model": {"name": str(decisive_model(model, folder))},
            "data": {
                "train_path": str(data),
                "val_path": str(data),
                "test_path": str(data),
                "num_workers": 1,
            },
            "tuning": {"mode": mode},
            "eval": {"max_new_tokens": 8, **evaluation},
            "output": {"name": mode, "dir": str(folder / "runs")},
        }
    )


def train_by_heart(config: RunConfig) -> FinishedRun:
    """Learns the rows until it knows them, and leaves what the trainer leaves."""
    torch.manual_seed(0)
    run = RunDir(Path(config.output.dir) / config.output.name)
    run.path.mkdir(parents=True)
    tokenizer = load_tokenizer(config.model)
    rows = prepare(config, tokenizer, model_limit=512, progress=False).train
    quantize = config.tuning.mode == "qlora"
    model = load_base(
        config.model,
        dtype="float32",
        attn_implementation="sdpa",
        device=torch.device("cpu"),
        quantize=quantize,
    )
    if config.tuning.mode != "full":
        model = attach_adapter(model, config.tuning.lora)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=3e-3)
    width = max(rows["length"])
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows["input_ids"]])
    labels = torch.tensor([row + [-100] * (width - len(row)) for row in rows["labels"]])
    for _ in range(300):
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss < 0.02:
            break
    model.save_pretrained(run.model if config.tuning.mode == "full" else run.adapter)
    return FinishedRun(config, run)


def config_of(base: Path, folder: Path, mode: str = "lora", **data) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"name": str(base)},
            "data": {"train_path": "unused.jsonl", **data},
            "tuning": {"mode": mode},
            "output": {"name": "order", "dir": str(folder / "runs")},
        }
    )


def random_run(base: Path, folder: Path, **data) -> FinishedRun:
    """A run whose adapter changes every layer, without training it."""
    config = config_of(base, folder, **data)
    run = RunDir(Path(config.output.dir) / config.output.name)
    model = load_base(
        config.model, dtype="float32", attn_implementation="sdpa", device=torch.device("cpu"), quantize=False
    )
    adapted = attach_adapter(model, config.tuning.lora)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(run.adapter)
    return FinishedRun(config, run)
