"""Published GPU measurements compared with our predictions, with explanations of the differences.

    python -m benchmarks.published          # also run by make bench-sizing

Nothing in SFT-Play was fitted to these figures. Peaks are predicted as torch.cuda.max_memory_allocated()
counts them, with two cuBLAS workspaces. Where a source writes GB but its own arithmetic shows GiB, the table
says GiB.
"""

import json
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig

from benchmarks.geometries import (
    GEMMA_3_270M,
    LLAMA_2_7B,
    LLAMA_2_13B,
    LLAMA_3_2_1B,
    LLAMA_3_2_3B,
    QWEN3_8B,
    QWEN3_600M,
)
from benchmarks.markdown import GB, RESULTS, in_unit
from benchmarks.published_sharded import KINDS, SPEED, planned_steps
from benchmarks.random_models import stock_forwards
from benchmarks.steps import step_of
from sft_play.config.schema import LoraSettings
from sft_play.engines.zero2 import Buckets
from sft_play.sizing.estimate.budget import HANDLES, HOPPER_WORKSPACE, OTHER_WORKSPACE
from sft_play.sizing.kernels.simulation import SymbolicRecorder
from sft_play.sizing.step import JoinedRows, PaddedRows
from sft_play.sizing.trace.trace import trace_step
from sft_play.ui.console import console
from sft_play.units import GIB, MIB

TRL_SFT = "https://github.com/huggingface/trl/pull/6859"
TRL_LOSS = "https://github.com/huggingface/trl/pull/6858"
TORCHTUNE = "https://github.com/pytorch/torchtune#optimization-flags"
LITGPT = "https://github.com/Lightning-AI/litgpt/blob/main/tutorials/resource-tables.md"
DEEPSPEED = "https://github.com/deepspeedai/DeepSpeed/issues/1302"


@dataclass(frozen=True)
class Figure:
    """A published number and our prediction, in bytes or tokens per second."""

    source: str
    what: str
    unit: int  # of which `published` is a multiple in the table; 1 for tokens per second
    published: float
    predicted: float
    note: str
    gpus: int = 1  # that divide the model

    @property
    def error(self) -> float:
        """Relative error, positive if the prediction is too high."""
        return self.predicted / self.published - 1


def peak(config: PretrainedConfig, *, workspace: int = HOPPER_WORKSPACE, **spec: object) -> int:
    """The predicted peak of a run on a GPU that computes as PEFT and transformers do."""
    with stock_forwards():
        step = trace_step(config, step_of(device="cuda", **spec)).step  # type: ignore[arg-type]
    return max(found.bytes for found in step.rounded(512).peaks().values()) + HANDLES * workspace


def full_logits_peak(tokens: int, hidden: int, vocabulary: int) -> int:
    """Peak of a trained bf16 output head with full logits and fp32 cross-entropy, forward and backward.

    The weight is [vocabulary, hidden], the hidden states are [tokens, hidden], the logits [tokens,
    vocabulary].
    """
    with FakeTensorMode():
        recorder = SymbolicRecorder(cuda=False, supervised=tokens, eval_supervised=tokens)
        with recorder:
            weight = torch.empty((vocabulary, hidden), dtype=torch.bfloat16, requires_grad=True)
            states = torch.empty((tokens, hidden), dtype=torch.bfloat16, requires_grad=True)
            labels = torch.zeros(tokens, dtype=torch.int64)
            torch.nn.functional.cross_entropy((states @ weight.t()).float(), labels).backward()
    return recorder.peak


def deepspeed_figures() -> list[Figure]:
    """Differences between ZeRO-2 runs that differ only in their bucket settings (MiB)."""
    big = 10**12  # trained parameters: more than any bucket holds

    def buckets(elements: float, overlap: bool) -> int:
        return Buckets(elements=int(elements), overlap=overlap).bytes(big, 2)

    base = buckets(5e8, True)
    note = "communication buffers only; all else is equal"
    rows = (
        ("reduce_bucket_size 5e8 -> 1e7", 21152 - 19284, buckets(1e7, True)),
        ("reduce_bucket_size 5e8 -> 1e8", 21152 - 19625, buckets(1e8, True)),
        ("overlap_comm true -> false at 5e8", 21152 - 20198, buckets(5e8, False)),
    )
    return [
        Figure(DEEPSPEED, f"ZeRO-2, {what}: saved", MIB, mib * MIB, base - less, note)
        for what, mib, less in rows
    ]


def trl_sft_figures() -> list[Figure]:
    """Whole SFT runs with TRL on one H100: 2048 tokens per row, checkpointing, weights and states in bf16."""
    figures = []
    loss = "their loss head uses other tiles"
    tied = (
        "the embedding is tied: autograd adds its two gradients in place, as on a CPU; 10.25 and 5.08 with a "
        "third tensor for the sum, which they may have kept"
    )
    end_of_backward = "the peak is at the end of the backward pass (all gradients), without the loss head"
    full = (
        ("Qwen3-8B", QWEN3_8B, 61.1, end_of_backward),
        ("Llama-3.2-1B", LLAMA_3_2_1B, 10.3, f"as above; {tied}"),
        ("Qwen3-0.6B", QWEN3_600M, 5.2, f"as above; {tied}; closer to the loss peak, where {loss}"),
        (
            "gemma-3-270m",
            GEMMA_3_270M,
            3.1,
            f"the peak is in the loss (262k vocabulary), and {loss}; 2.6 with another loss kernel",
        ),
    )
    for name, config, published, note in full:
        predicted = peak(
            config,
            mode="full",
            dtype="bfloat16",
            batch=PaddedRows(1, 2048),
            activations="recompute",
            accumulates=False,
        )
        figures.append(
            Figure(TRL_SFT, f"TRL full fine-tuning, {name}", GIB, published * GIB, predicted, note)
        )
    for tokens, published in ((2048, 16.7), (8192, 19.7)):
        predicted = peak(
            QWEN3_8B,
            mode="lora",
            lora=LoraSettings(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]),
            dtype="bfloat16",
            mixed_precision="bf16",
            batch=PaddedRows(tokens // 2048, 2048),
            activations="recompute",
            accumulates=False,
        )
        what = f"TRL LoRA r=16 on attention, Qwen3-8B, {tokens} tokens"
        note = (
            "adapters as in TRL's own LoRA benchmark (#5676); with adapters on all linear layers we predict "
            "0.4 to 0.9 GiB more"
        )
        figures.append(Figure(TRL_SFT, what, GIB, published * GIB, predicted, note))
    return figures


def trl_loss_figures() -> list[Figure]:
    """The output head and the loss alone, on one H100."""
    predicted = full_logits_peak(16384, 2048, 248320) + HANDLES * HOPPER_WORKSPACE
    note = (
        "12 bytes per logit, weight, gradients; the gradient of the previous iteration, if still live in "
        "their loop, adds 0.95 GiB"
    )
    return [
        Figure(TRL_LOSS, "loss alone, 16384 tokens x 248320 vocabulary", GIB, 47.55 * GIB, predicted, note)
    ]


def torchtune_figures() -> list[Figure]:
    """Llama-3.2-3B, bf16, 2 rows of 4096 packed tokens, A100; each row of the table adds to those above."""
    common = dict(dtype="bfloat16", cast_adapters=True, batch=JoinedRows(8192), longest=4096)
    # Without the weight and its gradient, which are counted with the model.
    loss = full_logits_peak(8192, 3072, 128256) - 2 * 2 * 128256 * 3072
    spec = step_of(device="cuda", mode="full", accumulates=False, **common)  # type: ignore[arg-type]
    with stock_forwards():
        before_loss = trace_step(LLAMA_3_2_3B, spec).step.rounded(512).peaks(in_layers=True)["forward"].bytes
    lora = LoraSettings(r=8, alpha=16)

    def checkpointed(mode: str, **changes: object) -> int:
        changes = common | changes | dict(mode=mode, activations="recompute")
        return peak(LLAMA_3_2_3B, workspace=OTHER_WORKSPACE, **changes)

    eager = "ours runs in eager mode, with TRL's loss head"
    rows = (
        ("packed, plain loss", 60.0, before_loss + loss, "end of the last layer's forward plus full logits"),
        ("+ compile, chunked loss, checkpointing", 24.9, checkpointed("full", accumulates=False), eager),
        ("LoRA, + offloading", 8.5, checkpointed("lora", lora=lora), "as above"),
        ("QLoRA, + offloading", 4.6, checkpointed("qlora", lora=lora), "as above"),
    )
    return [
        Figure(TORCHTUNE, f"torchtune {what}", GIB, gib * GIB, predicted, note)
        for what, gib, predicted, note in rows
    ]


def litgpt_figures() -> list[Figure]:
    """LitGPT's Llama 2: LoRA r=8 on q and v, dropout 0.05, bf16, 1304 tokens, A100, PyTorch 2.1 (in GB)."""
    common = dict(
        lora=LoraSettings(r=8, alpha=16, dropout=0.05, target_modules=["q_proj", "v_proj"]),
        dtype="bfloat16",
        cast_adapters=True,
        workspace=OTHER_WORKSPACE,
    )
    one, two = (peak(LLAMA_2_7B, mode="lora", batch=PaddedRows(rows, 1304), **common) for rows in (1, 2))
    logits = 12 * 32000 * 1304
    larger = peak(LLAMA_2_13B, mode="lora", batch=PaddedRows(1, 1304), **common)
    nf4 = peak(LLAMA_2_7B, mode="qlora", batch=PaddedRows(1, 1304), **common)
    why = "other model code (fused qkv, own norms) on PyTorch 2.1, which is not traced: explained in part"
    note = f"their full logits are {logits / GB:.2f} GB of it; {why}"
    rows = (
        ("Llama-2-7B LoRA, one more row", 29.07 - 21.30, two - one, note),
        ("Llama-2-7B LoRA, 1 row", 21.30, one, why),
        ("Llama-2-7B LoRA, 2 rows", 29.07, two, why),
        ("Llama-2-13B LoRA, 1 row", 38.12, larger, why),
        ("Llama-2-7B NF4 double-quantized, 1 row", 13.84, nf4, f"{why}; bitsandbytes 0.41"),
    )
    return [
        Figure(LITGPT, f"LitGPT {what}", GB, gb * GB, predicted, note) for what, gb, predicted, note in rows
    ]


def sharded_figures() -> list[Figure]:
    """Models that several GPUs divide: the memory of one of them, and the speed of all."""
    figures = []
    for step, tree in planned_steps():
        measured = [
            (KINDS[kind], step.unit, each, tree["memory"][kind]) for kind, each in step.memory.items()
        ]
        if step.tokens_per_second:
            measured.append((SPEED, 1, step.tokens_per_second, tree["plan"]["tokens_per_second"]))
        figures += [
            Figure(step.source, f"{step.what}: {kind}", unit, value * unit, predicted, step.note, step.gpus)
            for kind, unit, value, predicted in measured
        ]
    return figures


def figures() -> list[Figure]:
    """All published figures with our predictions."""
    groups = (
        deepspeed_figures,
        trl_sft_figures,
        trl_loss_figures,
        torchtune_figures,
        litgpt_figures,
        sharded_figures,
    )
    return [figure for group in groups for figure in group()]


def published_table(found: list[Figure]) -> Table:
    """The figures for the console."""
    table = Table(title="Published GPU measurements against our predictions (nothing was fitted)")
    for name in ("run", "published", "predicted", "difference", "explanation"):
        table.add_column(name, justify="left" if name in ("run", "explanation") else "right")
    for f in found:
        table.add_row(
            f"[link={f.source}]{f.what}[/link]",
            in_unit(f.published, f.unit),
            in_unit(f.predicted, f.unit),
            f"{f.error:+.1%}",
            f.note,
        )
    return table


def write(found: list[Figure]) -> Path:
    """Writes results/sizing_published.json, with sources."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "sizing_published.json"
    rows = [asdict(figure) | {"error": figure.error} for figure in found]
    path.write_text(
        json.dumps({"what": (__doc__ or "").splitlines()[0], "figures": rows}, indent=1) + "\n",
        encoding="utf-8",
    )
    return path


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    everything = figures()
    console().print(published_table(everything))
    console().print(f"wrote {write(everything)}")
