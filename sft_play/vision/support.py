"""What of a run goes together with images; everything else is refused in a sentence before it is planned."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sft_play.choices.engines import SEVERAL, TRAITS
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.plan import Plan
from sft_play.vision.looks import TRAINED, Look

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MODES = {"lora": ("lora",), "full": ("full",)}  # tuning.vision -> the modes that it is a part of


def require_supported(config: RunConfig, architecture: "PretrainedConfig", *, seen: bool) -> None:
    """Checks a run whose rows have images (`seen`), or have none.

    Raises:
        ConfigError: the model, or a setting, does not go together with images yet; or what sees is to be
            trained by another method than the rest, or without images.
    """
    vision, mode = config.tuning.vision, config.tuning.mode
    if seen:
        require_seeing(architecture)
    if seen and (setting := _against_images(config)):
        raise ConfigError(f"{setting} is not supported yet for rows with images; leave it out")
    if vision == "frozen":
        return
    if not seen:
        raise ConfigError(
            f"tuning.vision={vision} trains what sees of {architecture.model_type}, but no row has an "
            "image, so it would have no gradients; set tuning.vision=frozen"
        )
    if mode not in MODES[vision]:
        raise ConfigError(
            f"tuning.vision={vision} is a part of tuning.mode={' or '.join(MODES[vision])} (found "
            f"tuning.mode={mode}); set tuning.vision=frozen, or change one of them"
        )


def why_unseen(architecture: "PretrainedConfig") -> str | None:
    """Why rows and prompts for a model that sees cannot have images yet; None if they can."""
    if Look.of(architecture) is not None:
        return None
    return (
        f"rows with images of {architecture.model_type} would have to be padded, which is not supported yet; "
        f"use one of {TRAINED}, or rows of text"
    )


def require_seeing(architecture: "PretrainedConfig") -> None:
    """Raises a ConfigError if rows for a model cannot have images yet."""
    if why := why_unseen(architecture):
        raise ConfigError(f"model.name: {why}")


def _against_images(config: RunConfig) -> str | None:
    """The first setting with which rows with images are not trained; None if there is none."""
    train, parallel, attention = config.train, config.parallel, config.model.attention
    settings = {
        "train.packing=true": train.packing,
        "train.padding_free=false": train.padding_free is False,
        "train.compile=true": train.asks_compile,
        f"model.attention={attention}": attention not in ("auto", "varlen_sdpa"),
        f"parallel.sequence_parallel_size={parallel.sequence_parallel_size}": parallel.divides_tokens,
        f"parallel.engine={parallel.engine}": parallel.engine in TRAITS
        and not TRAITS[parallel.engine].takes_images,
    }
    return next((setting for setting, excluded in settings.items() if excluded), None)


def trained_on_images(drafts: Sequence[Plan]) -> list[Plan]:
    """Those of some plans with which rows with images can be trained.

    Raises:
        ConfigError: there is none, since their engine, or rows that have to be padded, exclude it.
    """
    found = [draft for draft in drafts if TRAITS[draft.sharing.engine].takes_images and draft.rows.joined]
    if found or not drafts:
        return found
    if not drafts[0].rows.joined:
        raise ConfigError(
            "rows with images are joined end to end, and this model's rows would be padded; use one of "
            f"{TRAINED}"
        )
    others = " or ".join(name for name, row in SEVERAL.items() if row.takes_images)
    raise ConfigError(
        f"parallel.engine={drafts[0].sharing.engine} is not supported yet for rows with images; set "
        f"parallel.engine={others}"
    )
