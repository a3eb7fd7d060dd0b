"""The same fine-tuning in a bare loop: PyTorch and PEFT, padded batches, nothing else.

python -m benchmarks.peers.bare work.json [--by-length]
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup

Encoded = tuple[torch.Tensor, torch.Tensor]  # tokens, labels


def encoded(rows: list[dict[str, str]], tokenizer: Any) -> list[Encoded]:
    """Tokens of each row, and labels in which the prompt carries no loss."""
    found = []
    for row in rows:
        prompt, completion = tokenizer(row["prompt"])["input_ids"], tokenizer(row["completion"])["input_ids"]
        found.append((torch.tensor(prompt + completion), torch.tensor([-100] * len(prompt) + completion)))
    return found


def batches(rows: list[Encoded], size: int, seed: int, *, by_length: bool) -> list[list[Encoded]]:
    """Random batches; `by_length`: batches of rows of similar length, in random order."""
    draw = random.Random(seed)
    rows = sorted(rows, key=lambda row: len(row[0])) if by_length else draw.sample(rows, len(rows))
    found = [rows[start : start + size] for start in range(0, len(rows), size)]
    draw.shuffle(found)
    return found


def loss_of(model: Any, batch: list[Encoded]) -> torch.Tensor:
    """Mean loss of the batch's answers; rows are padded on the right."""
    ids = pad_sequence([tokens for tokens, _ in batch], batch_first=True)
    labels = pad_sequence([labels for _, labels in batch], batch_first=True, padding_value=-100)
    return model(input_ids=ids, attention_mask=(ids != 0).long(), labels=labels, use_cache=False).loss


def train(work: dict[str, Any], *, by_length: bool) -> None:
    """Trains for one epoch and saves the adapter."""
    torch.manual_seed(work["seed"])
    lora = LoraConfig(
        r=work["rank"], lora_alpha=work["alpha"], target_modules="all-linear", task_type="CAUSAL_LM"
    )
    base = AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32)
    model = get_peft_model(base, lora).train()
    rows = encoded(work["rows"], AutoTokenizer.from_pretrained(work["model"]))
    steps = batches(rows, work["rows_per_step"], work["seed"], by_length=by_length)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, work["learning_rate"], weight_decay=0.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, work["warmup_steps"], len(steps))
    for batch in steps:
        loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.save_pretrained(work["adapter"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--by-length", action="store_true")
    args = parser.parse_args()
    train(json.loads(args.work.read_text(encoding="utf-8")), by_length=args.by_length)
