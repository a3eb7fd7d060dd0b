"""How well a model predicts the supervised tokens: sums, so that batches and processes can be added up in any order."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class TokenScore:
    """Sums over supervised tokens; loss and accuracy do not depend on how rows were batched or dealt to processes."""

    nll_sum: float
    tokens: int
    correct: int

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood of a supervised token, in nats."""
        return self.nll_sum / max(self.tokens, 1)

    @property
    def accuracy(self) -> float:
        """Share of supervised tokens that are the model's first choice."""
        return self.correct / max(self.tokens, 1)

    @classmethod
    def of(cls, sums: torch.Tensor) -> "TokenScore":
        """From the [3] tensor of `score_batch`, summed over batches."""
        nll_sum, tokens, correct = sums.tolist()
        return cls(nll_sum, int(tokens), int(correct))


@torch.no_grad()
def score_batch(model: torch.nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    """Negative log-likelihood, count and correct count of the batch's supervised tokens: a float64 tensor of shape [3].

    The model must have TRL's fused head (`trl.trainer.utils.add_fused_lm_head`), which builds no [tokens, vocabulary] logits.
    """
    outputs = model(**batch, use_cache=False, fused_lm_head=True)
    parts = (-outputs.log_probs.sum(), outputs.label_mask.sum(), outputs.is_top1.sum())
    return torch.stack([part.to(torch.float64) for part in parts])
