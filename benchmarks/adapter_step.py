"""A training step with adapters added in place beside one with PEFT's own forward passes, alternating.

    python -m benchmarks.adapter_step   # benchmarks/results/adapter_step_cpu.json; a minute, idle

The model is that of `bench-peers`: LoRA on all linear layers in fp32, one micro-batch of joined rows,
forward and backward. Seconds are by the clock, with all threads. Every other round has the other order.
"""

import os
import statistics
import time
import warnings
from contextlib import nullcontext
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.measurement_log import RESULTS, made_on, versions, write_result
from benchmarks.peers.work import HEADS, HIDDEN, INTERMEDIATE, LAYERS, VOCABULARY
from sft_play.config.schema import LoraSettings
from sft_play.machine.heap import keep_freed_memory
from sft_play.model import adapter_forward, attention
from sft_play.model.adapters import attach_adapter
from sft_play.model.loss_head import add_loss_head, token_loss
from sft_play.runlog import console
from sft_play.sizing.kernels import patched

LENGTHS = [190] * 16  # tokens of the joined rows, about as in GSM8K
ROUNDS, RANK = 16, 16


def adapted_model(*, stock: bool) -> Any:
    """The model with new adapters that compute as PEFT's do, or as ours."""
    architecture = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        intermediate_size=INTERMEDIATE,
    )
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(architecture, attn_implementation=attention.LIBRARY_NAME)
    add_loss_head(base)
    with patched(adapter_forward, "speed_up", lambda *_, **__: None) if stock else nullcontext():
        return attach_adapter(base, LoraSettings(r=RANK)).train()


def batch() -> dict[str, Any]:
    """Random tokens, two thirds of them with loss."""
    ids = torch.randint(5, VOCABULARY, (1, sum(LENGTHS)))
    labels = ids.clone()
    labels[0, ::3] = -100
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return {"input_ids": ids, "labels": labels, "position_ids": positions, "sequence_lengths": LENGTHS}


def seconds(model: Any, rows: dict[str, Any]) -> float:
    """Of a forward and a backward pass."""
    began = time.perf_counter()
    token_loss(model, dict(rows)).backward()
    return time.perf_counter() - began


def main() -> None:
    """Measures, prints and writes."""
    attention.register()
    keep_freed_memory()  # as in a run
    load, rows = os.getloadavg()[0], batch()
    models = {"peft": adapted_model(stock=True), "in_place": adapted_model(stock=False)}
    for model in models.values():
        seconds(model, rows)
    rounds = []
    for number in range(ROUNDS):
        order = list(models) if number % 2 else list(models)[::-1]
        rounds.append({name: seconds(models[name], rows) for name in order})
    ratios = [one["in_place"] / one["peft"] for one in rounds]
    found = {
        "what": (__doc__ or "").splitlines()[0],
        "made_on": made_on(torch.device("cpu")) | {"load_before": load},
        "versions": versions(),
        "tokens": sum(LENGTHS),
        "ratio_median": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in sorted(ratios)],
    }
    write_result(RESULTS / "adapter_step_cpu.json", found, {"rounds": rounds})
    console().print(f"in place / PEFT: {found['ratio_median']:.1%} of the time (median of {ROUNDS} rounds)")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
