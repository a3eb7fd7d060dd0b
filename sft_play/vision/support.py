"""What of a run goes together with images; everything else is refused in a sentence before it is planned."""

from collections.abc import Sequence

from sft_play.choices.engines import SEVERAL, TRAITS
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.plan import Plan
from sft_play.vision.fits import RowFits


def require_supported(config: RunConfig, model_type: str, *, seen: bool) -> None:
    """Checks a run whose rows have images (`seen`), or have none.

    Raises:
        ConfigError: a setting does not go together with images yet; or what sees is to be trained by another
            method than the rest, or without images.
    """
    vision, mode = config.tuning.vision, config.tuning.mode
    if seen and (setting := _against_images(config, model_type)):
        raise ConfigError(f"{setting} is not supported yet for rows with images; leave it out")
    if vision == "frozen":
        return
    if not seen:
        raise ConfigError(
            f"tuning.vision={vision} trains what sees of {model_type}, but no row has an "
            "image, so it would have no gradients; set tuning.vision=frozen"
        )
    if mode != vision:
        raise ConfigError(
            f"tuning.vision={vision} is a part of tuning.mode={vision} (found tuning.mode={mode}); set "
            "tuning.vision=frozen, or change one of them"
        )


def _against_images(config: RunConfig, model_type: str) -> str | None:
    """The first setting with which rows with images are not trained; None if there is none."""
    train, parallel, attention = config.train, config.parallel, config.model.attention
    settings = {
        "train.packing=true": train.packing,
        "train.padding_free=false": train.padding_free is False and model_type == "gemma3",
        "train.compile=true": train.asks_compile,
        "train.neftune_noise_alpha": train.neftune_noise_alpha is not None,
        f"model.attention={attention}": attention not in ("auto", "varlen_sdpa"),
        f"parallel.sequence_parallel_size={parallel.sequence_parallel_size}": parallel.divides_tokens,
        f"parallel.engine={parallel.engine}": parallel.engine in TRAITS
        and not TRAITS[parallel.engine].takes_images,
    }
    return next((setting for setting, excluded in settings.items() if excluded), None)


def trained_on(pictures: RowFits, drafts: Sequence[Plan]) -> list[Plan]:
    """Those of some plans with which rows with these pictures can be trained.

    Raises:
        ConfigError: there is none, since their engine excludes it.
    """
    found = [draft for draft in drafts if not pictures.exist or TRAITS[draft.sharing.engine].takes_images]
    if drafts and not found:
        others = " or ".join(name for name, row in SEVERAL.items() if row.takes_images)
        raise ConfigError(
            f"parallel.engine={drafts[0].sharing.engine} is not supported yet for rows with images; set "
            f"parallel.engine={others}"
        )
    return found
