"""A training step as this project computes it beside one with the libraries' own forward passes, alternating.

    python -m benchmarks.adapter_step   # benchmarks/results/adapter_step_cpu.json; a minute

The model is that of `bench-peers`: LoRA on all linear layers in fp32, one micro-batch of joined rows, forward
and backward. Three times the same weights: all as PEFT and transformers compute it, our adapters alone, and
our norms and rotary embeddings as well. Seconds are CPU time on one thread; the order of the three rotates.
"""

import os
import statistics
import time
import warnings
from contextlib import nullcontext
from typing import Any

import torch
from transformers import LlamaConfig

from benchmarks.measurement_log import RESULTS, made_on, versions, write_result
from benchmarks.peers.work import HEADS, HIDDEN, INTERMEDIATE, LAYERS, VOCABULARY
from benchmarks.random_models import random_base, stock_forwards
from sft_play.config.schema import LoraSettings
from sft_play.model.adapters.attach import attach_adapter
from sft_play.model.attention import varlen
from sft_play.model.layers.cpu import keep_freed_memory
from sft_play.model.layers.loss_head import add_loss_head, token_loss
from sft_play.ui.console import console

LENGTHS = [190] * 16  # tokens of the joined rows, about as in GSM8K
ROUNDS, RANK = 15, 16
KINDS = ("libraries", "our adapters", "ours")


def adapted_model(kind: str) -> Any:
    """The model with new adapters, of one of `KINDS`."""
    architecture = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        intermediate_size=INTERMEDIATE,
    )
    torch.manual_seed(0)
    with nullcontext() if kind == "ours" else stock_forwards():
        base = random_base(
            architecture,
            dtype="float32",
            attn_implementation=varlen.NAME,
            device=torch.device("cpu"),
            quantize=False,
        )
    add_loss_head(base)
    with stock_forwards() if kind == "libraries" else nullcontext():
        return attach_adapter(base, LoraSettings(r=RANK)).train()


def batch(lengths: list[int]) -> dict[str, Any]:
    """Joined rows of random tokens, two thirds of them with loss."""
    ids = torch.randint(5, VOCABULARY, (1, sum(lengths)))
    labels = ids.clone()
    labels[0, ::3] = -100
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": ids, "labels": labels, "position_ids": positions, "sequence_lengths": lengths}


def seconds(model: Any, rows: dict[str, Any]) -> float:
    """Of a forward and a backward pass."""
    began = time.process_time()
    token_loss(model, dict(rows)).backward()
    return time.process_time() - began


def main() -> None:
    """Measures, prints and writes."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as in a run
    load, rows = os.getloadavg()[0], batch(LENGTHS)
    models = {kind: adapted_model(kind) for kind in KINDS}
    for model in models.values():
        seconds(model, rows)
    rounds = []
    for number in range(ROUNDS):
        order = [KINDS[(number + shift) % len(KINDS)] for shift in range(len(KINDS))]
        rounds.append({kind: seconds(models[kind], rows) for kind in order})
    found: dict[str, Any] = {
        "what": (__doc__ or "").splitlines()[0],
        "made_on": made_on(torch.device("cpu")) | {"load_before": load},
        "versions": versions(),
        "tokens": sum(LENGTHS),
    }
    for kind in KINDS[1:]:
        ratios = sorted(one[kind] / one["libraries"] for one in rounds)
        found[f"{kind} / libraries"] = {
            "median": round(statistics.median(ratios), 4),
            "all": [round(ratio, 4) for ratio in ratios],
        }
        console().print(f"{kind} / libraries: {statistics.median(ratios):.1%} of the CPU time")
    write_result(RESULTS / "adapter_step_cpu.json", found, {"rounds": rounds})


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
