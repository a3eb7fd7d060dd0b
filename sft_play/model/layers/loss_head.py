"""The output head, the loss of a micro-batch, and the score of a batch, as sums that add up over batches."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from sft_play.model.architecture.families import family_of
from sft_play.model.architecture.shape import base_of
from sft_play.model.collators import Batch
from sft_play.model.layers.cpu import TiledLogProbs
from sft_play.units import AUTOCAST
from sft_play.upstream.transformers import has_routers
from sft_play.upstream.trl import add_fused_head


def add_loss_head(model: Any) -> None:
    """Gives a causal language model TRL's fused output head, which on a CPU computes with `TiledLogProbs`.

    `model(**batch, fused_lm_head=True)` then returns log-probabilities instead of logits.
    """
    base = base_of(model)
    if base.base_model is base:  # its prefix is that of a model that it is a part of (Llama 4)
        head = base.get_output_embeddings()
        base.base_model_prefix = next(name for name, child in base.named_children() if child is not head)
    text = base.config.get_text_config()
    if not hasattr(text, "num_experts") and hasattr(text, "num_local_experts"):
        text.num_experts = text.num_local_experts  # by that name, TRL's head balances them (Phi-3.5-MoE)
    for given, known in family_of(text).renames.items():
        setattr(text, known, getattr(text, given))
    if not has_routers(base):
        text.output_router_logits = False  # TRL asks for it wherever the config knows the word (Doge)
    add_fused_head(base, LogProbs)


def autocast_of(autocast: str, device: str) -> AbstractContextManager[Any]:
    """What a plan with this `autocast` computes a micro-batch in, on a kind of device; "no": nothing.

    accelerate has none where DeepSpeed will cast the model, which it has not yet done before the first step.
    """
    dtype = AUTOCAST.get(autocast)
    return torch.autocast(device, dtype=getattr(torch, dtype)) if dtype else nullcontext()


def token_loss(
    model: torch.nn.Module, batch: Batch, tokens: object = None, *, router_weight: float = 0.0
) -> torch.Tensor:
    """The sum of the `losses`, a scalar; `router_weight` is that of the loss that balances experts."""
    loss, balance = losses(model, batch, tokens)
    if balance is not None:
        loss = loss + router_weight * balance
    return loss


def losses(model: Any, batch: Batch, tokens: object = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The losses of a micro-batch of [rows, tokens], for a model with the head of `add_loss_head`: scalars.

    The first is averaged over `tokens`, by default the supervised ones of the micro-batch. The second is low
    where experts get equally many tokens; None unless the model's config asks for it.
    """
    outputs = model(**batch, use_cache=False, fused_lm_head=True)
    count = outputs.label_mask.sum() if tokens is None else torch.as_tensor(tokens)
    return -outputs.log_probs.sum() / count.clamp(min=1), outputs.aux_loss


def is_on_cpu(tensor: torch.Tensor) -> bool:
    """Whether the CPU computes with a tensor of any shape; a trace for a GPU gives another answer."""
    return tensor.device.type == "cpu"


class LogProbs:
    """`TiledLogProbs` on a CPU, TRL's kernel on a GPU."""

    @staticmethod
    def apply(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *args: object) -> Any:
        """Arguments and results as those of `TiledLogProbs`: hidden [tokens, hidden_size], and so on."""
        from trl.kernels import ChunkedLogProbFunction

        kernel = TiledLogProbs if is_on_cpu(hidden) else ChunkedLogProbFunction
        if not torch.is_grad_enabled():  # which a function cannot see from within
            weight, bias = weight.detach(), None if bias is None else bias.detach()
        with torch.cuda.device_of(hidden):  # Triton computes on the current GPU, not on that of its arguments
            return kernel.apply(hidden, weight, bias, *args)


@dataclass(frozen=True)
class TokenScore:
    """Sums over supervised tokens, so that loss and accuracy do not depend on how rows are batched."""

    nll_sum: float
    tokens: int
    correct: int

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood per supervised token, in nats."""
        return self.nll_sum / max(self.tokens, 1)

    @property
    def accuracy(self) -> float:
        """Share of supervised tokens that the model ranks first."""
        return self.correct / max(self.tokens, 1)

    @classmethod
    def of(cls, sums: torch.Tensor) -> "TokenScore":
        """The score from results of `score_batch`, [3], summed over batches."""
        nll_sum, tokens, correct = sums.tolist()
        return cls(nll_sum, int(tokens), int(correct))


@torch.no_grad()
def score_batch(model: torch.nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    """Negative log-likelihood, number, and correct predictions of a batch's supervised tokens, [3], float64.

    The model must have the output head of `add_loss_head`, which never materializes the [rows, tokens,
    vocabulary] logits.
    """
    outputs = model(**batch, use_cache=False, fused_lm_head=True)
    parts = (-outputs.log_probs.sum(), outputs.label_mask.sum(), outputs.is_top1.sum())
    return torch.stack([part.to(torch.float64) for part in parts])
