"""Writes the model card beside trained weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sft_play.config.schema import RunConfig
from sft_play.errors import StorageError
from sft_play.files import write_atomic
from sft_play.manifest import CARD
from sft_play.report.card import model_card
from sft_play.report.record import SPLITS, scores_of_models
from sft_play.runlog import RunDir, read_json


def write_card(config: RunConfig, run: RunDir, folder: Path, *, merged: bool = False) -> None:
    """Writes README.md into the folder of a run's weights; replaces the one that PEFT writes."""
    write_atomic(folder / CARD, _text(config, run, merged=merged))


def _text(config: RunConfig, run: RunDir, *, merged: bool) -> str:
    found = {split: scores_of_models(read_json(run.evaluation(split))) for split in SPLITS}
    return model_card(config, read_json(run.summary), found, merged=merged)


@contextmanager
def renewed_cards(config: RunConfig, run: RunDir) -> Iterator[None]:
    """Writes the cards of a run again after new scores were written within; those that people edited stay.

    Raises:
        StorageError: a card cannot be written.
    """
    folders = {run.adapter: False, run.model: False, run.merged: True}
    ours = [
        folder for folder, merged in folders.items() if _is_ours(folder, _text(config, run, merged=merged))
    ]
    yield
    for folder in ours:
        try:
            write_card(config, run, folder, merged=folders[folder])
        except OSError as error:
            raise StorageError(f"cannot write {folder / CARD}: {error.strerror}") from error


def _is_ours(folder: Path, text: str) -> bool:
    """Whether the card has not been edited."""
    try:
        return (folder / CARD).read_text(encoding="utf-8") == text
    except (OSError, UnicodeDecodeError):
        return False
