"""Writes the model card beside trained weights."""

from pathlib import Path

from sft_play.config.schema import RunConfig
from sft_play.manifest import CARD
from sft_play.report.card import model_card
from sft_play.runlog import RunDir, read_json


def write_card(config: RunConfig, run: RunDir, folder: Path, *, merged: bool = False) -> None:
    """Writes README.md into the folder of a run's weights; replaces the one that PEFT writes."""
    card = model_card(config, read_json(run.summary), merged=merged)
    (folder / CARD).write_text(card, encoding="utf-8")
