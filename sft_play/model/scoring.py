"""Scores how well a model predicts supervised tokens, as sums that add up over batches and processes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


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
    """Negative log-likelihood, number, and number of correct predictions of a batch's supervised tokens.

    The model must have the output head of `model.loss_head.add_loss_head`, which never materializes the
    [rows, tokens, vocabulary] logits.

    Args:
        model: the model.
        batch: `input_ids`, `labels` and `position_ids`, each [rows, tokens].

    Returns:
        [3], float64.
    """
    outputs = model(**batch, use_cache=False, fused_lm_head=True)
    parts = (-outputs.log_probs.sum(), outputs.label_mask.sum(), outputs.is_top1.sum())
    return torch.stack([part.to(torch.float64) for part in parts])
