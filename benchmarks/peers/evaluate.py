"""The loss of a trained model on held-out answers, in nats per token; the same for all contestants.

python -m benchmarks.peers.evaluate MODEL TRAINED ROWS

TRAINED is a folder with a PEFT adapter, or a file with all weights under the names of Transformers.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.peers.bare import encoded


def trained_model(base: Path, trained: Path) -> Any:
    """The base model with the trained weights."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if trained.is_dir():
        return PeftModel.from_pretrained(model, trained).eval()
    model.load_state_dict(torch.load(trained, weights_only=True))
    return model.eval()


@torch.no_grad()
def mean_loss(model: Any, rows: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Mean loss over all tokens of all answers."""
    total, count = 0.0, 0
    for tokens, labels in rows:
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum").item()
        count += int((labels[1:] != -100).sum())
    return total / count


if __name__ == "__main__":
    base, trained, file = map(Path, sys.argv[1:])
    rows = encoded(json.loads(file.read_text(encoding="utf-8")), AutoTokenizer.from_pretrained(base))
    print(json.dumps({"loss": mean_loss(trained_model(base, trained), rows)}))
