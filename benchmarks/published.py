"""GPU measurements that others have published, beside our prediction, and why the two differ where they do.

    python -m benchmarks.published          # also at the end of make bench-sizing

Nothing here was fitted to these figures. Peaks are predicted as torch.cuda.max_memory_allocated() counts them, with two cuBLAS
workspaces. Where a source writes GB and its own arithmetic shows GiB, the table says GiB.
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
from sft_play.config.schema import LoraSettings
from sft_play.runlog import console
from sft_play.sizing.kernels import SymbolicLedger
from sft_play.sizing.memory import HANDLES, HOPPER_WORKSPACE, OTHER_WORKSPACE, ZeroBuckets
from sft_play.sizing.step import StepSpec
from sft_play.sizing.trace import trace_step
from sft_play.units import GIB, MIB

RESULTS = Path(__file__).parent / "results"
GB = 10**9

TRL_SFT = "https://github.com/huggingface/trl/pull/6859"
TRL_LOSS = "https://github.com/huggingface/trl/pull/6858"
TORCHTUNE = "https://github.com/pytorch/torchtune#optimization-flags"
LITGPT = "https://github.com/Lightning-AI/litgpt/blob/main/tutorials/resource-tables.md"
DEEPSPEED = "https://github.com/deepspeedai/DeepSpeed/issues/1302"


@dataclass(frozen=True)
class Figure:
    """A published number and ours, in bytes."""

    source: str
    what: str
    unit: int
    published: float
    predicted: float
    note: str

    @property
    def error(self) -> float:
        """Relative, positive where we predict more."""
        return self.predicted / self.published - 1


def peak(config: PretrainedConfig, *, workspace: int = HOPPER_WORKSPACE, **spec: object) -> int:
    """The predicted peak of a run on a GPU."""
    step = trace_step(config, StepSpec(device="cuda", **spec)).step  # type: ignore[arg-type]
    return max(found.bytes for found in step.peaks(512).values()) + HANDLES * workspace


def whole_logits_peak(tokens: int, hidden: int, vocabulary: int) -> int:
    """A trained bf16 output head with all logits in memory and an fp32 cross-entropy, forward and backward."""
    with FakeTensorMode():
        ledger = SymbolicLedger(cuda=False, supervised=tokens, eval_supervised=tokens)
        with ledger:
            weight = torch.empty((vocabulary, hidden), dtype=torch.bfloat16, requires_grad=True)
            states = torch.empty((tokens, hidden), dtype=torch.bfloat16, requires_grad=True)
            labels = torch.zeros(tokens, dtype=torch.int64)
            torch.nn.functional.cross_entropy((states @ weight.t()).float(), labels).backward()
    return ledger.peak


def deepspeed_figures() -> list[Figure]:
    """Differences between ZeRO-2 runs that differ in their buckets alone (MiB)."""
    big = 10**12  # of trained parameters: the bucket is the smaller

    def buckets(elements: float, overlap: bool) -> int:
        return ZeroBuckets(elements=int(elements), overlap=overlap).bytes(big, 2)

    base = buckets(5e8, True)
    note = "buffers only; the rest of the run is equal"
    rows = (
        ("reduce_bucket_size 5e8 -> 1e7", 21152 - 19284, buckets(1e7, True)),
        ("reduce_bucket_size 5e8 -> 1e8", 21152 - 19625, buckets(1e8, True)),
        ("overlap_comm true -> false at 5e8", 21152 - 20198, buckets(5e8, False)),
    )
    return [Figure(DEEPSPEED, f"ZeRO-2, {what}: saved", MIB, mib * MIB, base - less, note) for what, mib, less in rows]


def trl_sft_figures() -> list[Figure]:
    """Whole SFT runs with TRL on one H100, 2048 tokens a row, checkpointing, weights and states in bf16."""
    figures = []
    loss = "their loss head works in other tiles"
    full = (
        ("Qwen3-8B", QWEN3_8B, 61.1, "gradients of all weights at the end of the backward: no loss head in it"),
        ("Llama-3.2-1B", LLAMA_3_2_1B, 10.3, "as above"),
        ("Qwen3-0.6B", QWEN3_600M, 5.2, "as above; nearer to the loss, where " + loss),
        ("gemma-3-270m", GEMMA_3_270M, 3.1, f"the peak is the loss, and {loss} (262k words); 2.6 with another loss kernel"),
    )
    for name, config, published, note in full:
        predicted = peak(
            config, mode="full", dtype="bfloat16", rows=1, row_tokens=2048, gradient_checkpointing=True, accumulates=False
        )
        figures.append(Figure(TRL_SFT, f"TRL full fine-tuning, {name}", GIB, published * GIB, predicted, note))
    for tokens, published in ((2048, 16.7), (8192, 19.7)):
        predicted = peak(
            QWEN3_8B,
            mode="lora",
            lora=LoraSettings(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]),
            dtype="bfloat16",
            mixed_precision="bf16",
            rows=tokens // 2048,
            row_tokens=2048,
            gradient_checkpointing=True,
            accumulates=False,
        )
        what = f"TRL LoRA r=16 on attention, Qwen3-8B, {tokens} tokens"
        note = "adapters as in that project's own LoRA benchmark (#5676); on all linear layers we predict 0.4 to 0.9 GiB more"
        figures.append(Figure(TRL_SFT, what, GIB, published * GIB, predicted, note))
    return figures


def trl_loss_figures() -> list[Figure]:
    """The output head and the loss alone, on one H100."""
    predicted = whole_logits_peak(16384, 2048, 248320) + HANDLES * HOPPER_WORKSPACE
    note = "12 bytes a logit, weight, gradients; the gradient of an earlier round, if alive in their loop, adds 0.95 GiB"
    return [Figure(TRL_LOSS, "loss alone, 16384 tokens x 248320 words", GIB, 47.55 * GIB, predicted, note)]


def torchtune_figures() -> list[Figure]:
    """Llama-3.2-3B, bf16, 2 rows of 4096 packed tokens, A100; each step of the ladder keeps the ones before it."""
    common = dict(dtype="bfloat16", all_in_dtype=True, packing=True, rows=2, row_tokens=4096, workspace=OTHER_WORKSPACE)
    plain = whole_logits_peak(8192, 3072, 128256) - 2 * 2 * 128256 * 3072  # without weight and gradient, which the model has
    full = trace_step(LLAMA_3_2_3B, StepSpec(device="cuda", mode="full", accumulates=False, **_only_spec(common))).step  # type: ignore[arg-type]
    before_loss = full.peaks(512, in_layers=True)["forward"].bytes
    lora = LoraSettings(r=8, alpha=16)
    rows = (
        ("packed, plain loss", 60.0, before_loss + plain, "end of the last layer's forward plus whole logits"),
        (
            "+ compile, chunked loss, checkpointing",
            24.9,
            peak(LLAMA_3_2_3B, mode="full", gradient_checkpointing=True, accumulates=False, **common),
            "ours runs eagerly, with TRL's loss head",
        ),
        (
            "LoRA, + offloading",
            8.5,
            peak(LLAMA_3_2_3B, mode="lora", lora=lora, gradient_checkpointing=True, **common),
            "as above",
        ),
        (
            "QLoRA, + offloading",
            4.6,
            peak(LLAMA_3_2_3B, mode="qlora", lora=lora, gradient_checkpointing=True, **common),
            "as above",
        ),
    )
    return [Figure(TORCHTUNE, f"torchtune {what}", GIB, gib * GIB, predicted, note) for what, gib, predicted, note in rows]


def _only_spec(common: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in common.items() if name != "workspace"}


def litgpt_figures() -> list[Figure]:
    """LitGPT's own Llama 2 with LoRA r=8 on query and value, dropout 0.05, bf16, 1304 tokens, A100, PyTorch 2.1 (GB)."""
    common = dict(
        lora=LoraSettings(r=8, alpha=16, dropout=0.05, target_modules=["q_proj", "v_proj"]),
        dtype="bfloat16",
        all_in_dtype=True,
        row_tokens=1304,
        workspace=OTHER_WORKSPACE,
    )
    one, two = (peak(LLAMA_2_7B, mode="lora", rows=rows, **common) for rows in (1, 2))
    logits = 12 * 32000 * 1304
    why = "other model code (joined qkv, own norms) on PyTorch 2.1, not traced: explained in part"
    note = f"their whole logits are {logits / GB:.2f} GB of it; {why}"
    return [
        Figure(LITGPT, "LitGPT Llama-2-7B LoRA, one more row", GB, (29.07 - 21.30) * GB, two - one, note),
        Figure(LITGPT, "LitGPT Llama-2-7B LoRA, 1 row", GB, 21.30 * GB, one, why),
        Figure(LITGPT, "LitGPT Llama-2-7B LoRA, 2 rows", GB, 29.07 * GB, two, why),
        Figure(LITGPT, "LitGPT Llama-2-13B LoRA, 1 row", GB, 38.12 * GB, peak(LLAMA_2_13B, mode="lora", rows=1, **common), why),
        Figure(
            LITGPT,
            "LitGPT Llama-2-7B NF4 double-quantised, 1 row",
            GB,
            13.84 * GB,
            peak(LLAMA_2_7B, mode="qlora", rows=1, **common),
            f"{why}; bitsandbytes 0.41",
        ),
    ]


def figures() -> list[Figure]:
    """All of them."""
    groups = (deepspeed_figures, trl_sft_figures, trl_loss_figures, torchtune_figures, litgpt_figures)
    return [figure for group in groups for figure in group()]


def published_table(found: list[Figure]) -> Table:
    """Each figure beside ours."""
    units = {GIB: "GiB", MIB: "MiB", GB: "GB"}
    table = Table(title="Published GPU measurements against our prediction (nothing fitted)")
    for name in ("what", "published", "predicted", "difference", "where and why"):
        table.add_column(name, justify="left" if name in ("what", "where and why") else "right")
    for f in found:
        unit = units[f.unit]
        digits = 0 if f.unit == MIB else 2
        table.add_row(
            f"[link={f.source}]{f.what}[/link]",
            f"{f.published / f.unit:.{digits}f} {unit}",
            f"{f.predicted / f.unit:.{digits}f} {unit}",
            f"{f.error:+.1%}",
            f.note,
        )
    return table


def write(found: list[Figure]) -> Path:
    """Into results/, with sources."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "sizing_published.json"
    rows = [asdict(figure) | {"error": figure.error} for figure in found]
    path.write_text(json.dumps({"what": (__doc__ or "").splitlines()[0], "figures": rows}, indent=1) + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    everything = figures()
    console().print(published_table(everything))
    console().print(f"written: {write(everything)}")
