"""Families of models whose oddities neither their config nor their code tells; a new one is one row here.

Whatever can be found out is asked of config and code instead (`shape`, `attention.choice`,
`adapters.targets`). How llama.cpp runs a family is a row of `export.architecture`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DRAFTS = "drafts tokens for another model and computes nothing without it"
# A head with more than a matrix and the scales that our loss knows; `train.verify.check_head` finds others.
OTHER_HEAD = "has an output head that SFT-Play's loss does not support"


@dataclass(frozen=True)
class Family:
    """What is odd about a family."""

    refused: str | None = None
    """Why it cannot be trained here; follows its name."""
    reads_both_ways: bool = False
    """An encoder that fills in no masks, or whose prompts are seen as a whole; not if it is a decoder."""
    text_alone: bool = False
    """To build the whole model takes a package that training does without, so its text part is loaded."""
    own_masks: bool = False
    """Its layers give their attention another mask than they got."""
    loses_boundaries: bool = False
    """Its layers do not hand on where joined rows begin; `train.verify` finds others."""
    clamps_weights: bool = False
    """It clamps weights while it trains."""
    renames: Mapping[str, str] = field(default_factory=dict)
    """Settings that the output head looks for under another name."""


FAMILIES = {
    "bert-generation": Family(reads_both_ways=True),
    "cpmant": Family(reads_both_ways=True),
    "doge": Family(own_masks=True),
    "gemma3n": Family(text_alone=True),
    "gemma3n_text": Family(clamps_weights=True),
    "gemma4_assistant": Family(refused=DRAFTS),
    "gemma4_unified_assistant": Family(refused=DRAFTS),
    "inkling_text": Family(refused=OTHER_HEAD),
    "mllama": Family(refused="has layers that run only where there is an image, which is not supported yet"),
    "modernbert-decoder": Family(refused=OTHER_HEAD),
    "nemotron": Family(loses_boundaries=True),
    "reformer": Family(refused="computes its gradients by itself, and none for adapters"),
    "trocr": Family(refused="is an encoder-decoder"),
    "xlnet": Family(reads_both_ways=True),
    "xlstm": Family(renames={"output_logit_soft_cap": "final_logit_softcapping"}),
    "zaya": Family(own_masks=True),
}
PLAIN = Family()


def family_of(config: "PretrainedConfig") -> Family:
    """The family of a model, or of the text part that it was given by."""
    return FAMILIES.get(config.model_type, PLAIN)
