"""Times output heads with their loss, forward and backward: TRL's, which GPUs use, Liger's, and that of CPUs.

    python -m benchmarks.heads                          # on a CUDA machine, at most two minutes
    python -m benchmarks.heads --device cpu --quick     # the same program with a tiny head

The first form writes benchmarks/results/heads_gpu.json, the second one nothing. TRL's computes logits twice,
in tiles of a fixed size; the others take gradients in the forward pass, so they compute one of three products
with a frozen weight less, one of four with a trained one. Liger's is no choice of a run: it saves a tile of
256 MiB at most and half of one gradient (decision 0104), so it has to be faster to become one.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.alone import figure
from benchmarks.measurement_log import MeasurementLog, write_result
from benchmarks.sizing_gpu import arguments, local_device, results_of
from sft_play.choices.kernels import LIGER
from sft_play.model.layers.cpu import TiledLogProbs
from sft_play.ui.console import console
from sft_play.units import MIB

ROUNDS = 5
MINUTES = 2.0
LIMIT_S = 60  # of a case
VOCABULARY_TILE = 32768  # of TRL's head, as `trl.trainer.utils` calls it


@dataclass(frozen=True)
class Case:
    """A head, and what it is given."""

    name: str
    hidden: int
    vocabulary: int
    tokens: int
    trained: bool  # its weight, too; else only what comes before it


QUICK = (Case("tiny", 32, 100, 24, trained=False), Case("tiny", 32, 100, 24, trained=True))
CASES = tuple(
    Case(name, hidden, vocabulary, tokens, trained)
    for tokens in (2048, 8192)
    for name, hidden, vocabulary in (("Qwen2.5-0.5B", 896, 151936), ("Llama-3.1-8B", 4096, 128256))
    for trained in (False, True)
)


def trl_loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The sum of the losses of [tokens] targets; hidden and weight as `inputs` has them."""
    from trl.kernels import ChunkedLogProbFunction

    options = (1.0, VOCABULARY_TILE, None, 1.0, ())
    return -ChunkedLogProbFunction.apply(hidden, weight, None, targets, *options)[0].sum()


def tiled_loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The same by the head that training on a CPU has."""
    return -TiledLogProbs.apply(hidden, weight, None, targets, 1.0, 0, None, 1.0, ())[0].sum()


def liger_loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The same by Liger's fused linear cross entropy, whose sums for a trained weight are in fp32."""
    from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction

    sums = torch.float32 if weight.requires_grad else None
    options = (None, None, -100, 0.0, 0.0, "sum", None, False, sums)
    return LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, targets, *options)[0]


Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
HEADS: dict[str, Loss] = {"trl": trl_loss, "tiled": tiled_loss, "liger": liger_loss}


def inputs(case: Case, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """Hidden states [tokens, hidden_size], a weight [vocabulary, hidden_size] and targets [tokens]."""
    torch.manual_seed(0)
    with device:
        hidden = torch.randn(case.tokens, case.hidden, dtype=dtype).requires_grad_()
        weight = (torch.randn(case.vocabulary, case.hidden, dtype=dtype) / 50).requires_grad_(case.trained)
        return [hidden, weight, torch.randint(case.vocabulary, (case.tokens,))]


def outcome(loss: Loss, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """The loss and the gradients, once."""
    for each in given[:2]:
        each.grad = None
    value = loss(*given)
    value.backward()
    return [value.detach().float(), *(each.grad for each in given[:2] if each.grad is not None)]


def measured(case: Case, device: torch.device) -> dict[str, Any]:
    """Seconds and peak bytes of each head, which take turns; and how far it is from the first that works."""
    found: dict[str, Any] = {}
    try:
        given = inputs(case, device, _dtype(device))
    except RuntimeError as error:
        return asdict(case) | {"heads": {name: {"problem": _line(error)} for name in HEADS}}
    heads = {name: loss for name, loss in HEADS.items() if name != "liger" or _runs_liger(device)}
    first, ours = list[torch.Tensor](), list[torch.Tensor]()
    for name, loss in heads.items():
        try:
            ours = outcome(loss, given)
        except (RuntimeError, ImportError) as error:  # another head is still measured
            found[name] = {"problem": _line(error)}
            continue
        first = first or ours
        differs = max(_difference(*pair) for pair in zip(ours, first, strict=True))
        found[name] = {"differs": differs, "seconds": [], "bytes": 0}
    del first, ours
    for _ in range(ROUNDS):
        for name in (name for name in found if "problem" not in found[name]):
            seconds, peak = _timed(heads[name], given, device)
            found[name]["seconds"].append(seconds)
            found[name]["bytes"] = max(peak, found[name]["bytes"])
    return asdict(case) | {"heads": found}


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _dtype(device: torch.device) -> torch.dtype:
    """The 16-bit type that training would have."""
    has_bf16 = device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if has_bf16 else torch.float16


def _runs_liger(device: torch.device) -> bool:
    return device.type == "cuda" and LIGER.is_installed()


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Relative, in the sum of squares."""
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


def _timed(loss: Loss, given: list[torch.Tensor], device: torch.device) -> tuple[float, int]:
    """Seconds, and on a GPU the bytes above those of the inputs."""
    on_gpu = device.type == "cuda"
    for each in given[:2]:
        each.grad = None
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    began = time.perf_counter()
    loss(*given).backward()
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return seconds, torch.cuda.max_memory_allocated() - before if on_gpu else 0


def sentences(rows: list[dict[str, Any]]) -> list[str]:
    """One for each case: milliseconds and memory of each head."""
    found = []
    for row in rows:
        parts = [f"{name} {_figures(head)}" for name, head in row["heads"].items()]
        kind = "trained" if row["trained"] else "frozen"
        found.append(f"{row['name']}, {kind}, {row['tokens']:,} tokens: {', '.join(parts)}")
    return found


def _figures(head: dict[str, Any]) -> str:
    if "problem" in head:
        return head["problem"]
    return f"{1000 * statistics.median(head['seconds']):.1f} ms {head['bytes'] / MIB:,.0f} MiB"


def case(tree: dict[str, Any], device_type: str) -> dict[str, Any]:
    """`measured` for a process of its own."""
    return measured(Case(**tree), torch.device(device_type))


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if a head failed."""
    began = time.monotonic()
    args = arguments(__doc__, MINUTES).parse_args(argv)
    device, results = local_device(args), results_of(args)
    lines, cases = (
        MeasurementLog(results / f"heads_{device.type}.lines.jsonl", device),
        list(map(asdict, CASES)),
    )
    if args.quick:
        cases = list(map(asdict, QUICK))
    done = [{name: row[name] for name in cases[0]} for row in lines.read()]
    for each in (each for each in cases if each not in done):
        deadline = began + 60 * args.minutes
        row = figure("benchmarks.heads:case", each, device.type, deadline=deadline, limit_s=LIMIT_S)
        if row is None:
            break
        if "problem" in row:
            row = each | {"heads": dict.fromkeys(HEADS, row)}
        lines.add(row)
        console().print(*sentences([row]), markup=False, highlight=False, soft_wrap=True)
    rows = lines.read()
    head = {"what": (__doc__ or "").splitlines()[0], **lines.made, "found": sentences(rows), "of": len(cases)}
    write_result(results / "heads_gpu.json", head, {"cases": rows})
    return int(any("problem" in head for row in rows for head in row["heads"].values()))


if __name__ == "__main__":
    sys.exit(main())
