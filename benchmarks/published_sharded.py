"""Published steps of models that several GPUs divide, beside what `make plan` says of such a run here.

Others trained with code of their own, and from most tables no step can be rebuilt to the byte. So each step
is planned as a user would plan it, with our engine, loss and kernels, and a note says where theirs differs.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.geometries import LLAMA_2_70B
from benchmarks.markdown import GB
from sft_play.api import plan
from sft_play.units import GIB

ALLOCATED, RESERVED, PROCESS = "peak_bytes", "reserved_bytes", "process_bytes"  # of a plan's memory
KINDS = {ALLOCATED: "allocated", RESERVED: "reserved", PROCESS: "by nvidia-smi"}
SPEED = "tokens/s"

TITAN = "https://github.com/pytorch/torchtitan/pull/165"
TUNE = "https://github.com/meta-pytorch/torchtune/blob/7d470bf/README.md"
GIST = "https://gist.github.com/chenyaofo/d4cd6a20ab4b95cb3a49491747e2139a"
PEFT = "https://huggingface.co/docs/peft/accelerate/deepspeed"
SOUP = "https://github.com/MakazhanAlpamys/Soup/blob/2428453/benchmarks/gate-h100-validation.md"

LLAMA_2_7B, LLAMA_3_8B = "meta-llama/Llama-2-7b-hf", "meta-llama/Llama-3.1-8B"
LLAMA_3_70B, LLAMA_3_405B = "meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-405B"
H100, A100 = "H100 80GB", "A100 80GB"

TUNE_LORA = {
    "tuning.lora.r": 16,
    "tuning.lora.alpha": 32,
    "tuning.lora.dropout": 0.0,
    "tuning.lora.target_modules": "[q_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]",
}
PEFT_LORA = {"tuning.lora.r": 8, "tuning.lora.alpha": 16, "tuning.lora.dropout": 0.1}
LOGITS = "their logits are whole, ours in tiles"


@dataclass(frozen=True, kw_only=True)
class Published:
    """A step that others measured, and the settings that come closest to it here."""

    source: str  # URL
    who: str
    model: str
    gpu: str
    gpus: int
    rows: int  # of a micro-batch
    tokens: int  # of a row
    mode: str
    engine: str
    activations: str = "recompute"
    settings: dict[str, Any] = field(default_factory=dict)
    unit: int  # bytes of what `memory` counts
    memory: dict[str, float]  # of one GPU, under names of KINDS
    tokens_per_second: float | None = None  # of all GPUs together
    note: str

    @property
    def what(self) -> str:
        """The step in a few words."""
        name = Path(self.model).name
        batch = f"{self.rows} x {self.tokens:,} tokens"
        kept = {"keep": "kept", "recompute": "recomputed"}[self.activations]
        return f"{self.who}, {self.mode} {name}, {self.gpus} x {self.gpu}, {batch}, activations {kept}"

    def planned(self) -> dict[str, Any]:
        """What `make plan --json` prints of such a run."""
        run = {
            "tuning.mode": self.mode,
            "parallel.engine": self.engine,
            "model.max_seq_len": self.tokens,
            "train.batch_size": self.rows,
            "train.effective_batch_size": self.rows * self.gpus,
            "train.padding_free": False,
            "train.activations": self.activations,
        }
        return plan(self.model, gpu=self.gpu, gpus=self.gpus, settings=run | self.settings).tree


def published_steps(llama_2_70b: str) -> Iterator[Published]:
    """All of them; the argument is a folder with that model's config.json, which we do not ship."""
    yield Published(
        source=TITAN,
        who="torchtitan FSDP2",
        model=LLAMA_2_7B,
        gpu=H100,
        gpus=8,
        rows=8,
        tokens=2048,
        mode="full",
        engine="fsdp2",
        unit=GIB,
        memory={ALLOCATED: 22.73, RESERVED: 31.02},
        tokens_per_second=8 * 6200,
        note=f"{LOGITS}; eager, in March 2024",
    )
    tune = {"source": TUNE, "gpu": A100, "gpus": 8, "rows": 2, "tokens": 2048, "engine": "fsdp2"}
    tune |= {"unit": GIB, "who": "torchtune FSDP2"}
    bf16 = {"model.dtype": "bfloat16"}
    yield Published(
        **tune,
        model=LLAMA_3_70B,
        mode="lora",
        settings=TUNE_LORA | bf16,
        memory={ALLOCATED: 27.6},
        tokens_per_second=3497,
        note="theirs is compiled, with adapters in bf16",
    )
    yield Published(
        **tune,
        model=LLAMA_3_70B,
        mode="full",
        settings=bf16 | {"parallel.offload": "ram"},
        memory={ALLOCATED: 13.9},
        note="theirs is compiled; 1,568 tokens/s, where we predict none for lack of the host's speed",
    )
    yield Published(
        **tune,
        model=LLAMA_3_405B,
        mode="qlora",
        settings=TUNE_LORA,
        memory={ALLOCATED: 44.8},
        tokens_per_second=653,
        note="theirs is compiled, with NF4 of torchao; their recipe has a single row",
    )
    gist = {"source": GIST, "model": LLAMA_2_7B, "gpu": A100, "gpus": 8, "tokens": 4096, "mode": "full"}
    gist |= {"unit": GB}
    for stage, activations, rows, peak in (
        (2, "keep", 1, 44.8),
        (2, "recompute", 1, 23.5),
        (2, "recompute", 4, 38.6),
        (3, "keep", 2, 75.7),
        (3, "recompute", 2, 20.4),
        (3, "recompute", 8, 39.1),
    ):
        yield Published(
            **gist,
            who=f"DeepSpeed ZeRO-{stage}",
            engine=f"deepspeed_z{stage}",
            rows=rows,
            activations=activations,
            memory={ALLOCATED: peak},
            note=f"{LOGITS}; A800, DeepSpeed 0.14, GB as printed",
        )
    yield Published(
        source=PEFT,
        who="PEFT with ZeRO-3",
        model=llama_2_70b,
        gpu=H100,
        gpus=8,
        rows=8,
        tokens=2048,
        mode="lora",
        engine="deepspeed_z3",
        settings=PEFT_LORA,
        unit=GB,
        memory={PROCESS: 64},
        note=f"{LOGITS}; read from a screen",
    )
    yield Published(
        source=PEFT,
        who="PEFT with ZeRO-3",
        model=llama_2_70b,
        gpu="A100 40GB",
        gpus=2,
        rows=2,
        tokens=2048,
        mode="qlora",
        engine="deepspeed_z3",
        settings=PEFT_LORA,
        unit=GB,
        memory={PROCESS: 36.6},
        note=f"{LOGITS}; read from a screen",
    )
    yield Published(
        source=SOUP,
        who="Soup with ZeRO-3",
        model=LLAMA_3_8B,
        gpu="H100 PCIe",
        gpus=8,
        rows=8,
        tokens=128,
        mode="lora",
        engine="deepspeed_z3",
        settings={"tuning.lora.r": 8},
        unit=GB,
        memory={PROCESS: 34.0},
        note="more than the 30.0 GB of the same author's run on one GPU: nothing was saved by dividing",
    )


def planned_steps() -> Iterator[tuple[Published, dict[str, Any]]]:
    """Each step with its plan's JSON object."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "Llama-2-70b-hf"
        LLAMA_2_70B.save_pretrained(folder)
        for step in published_steps(str(folder)):
            yield step, step.planned()
