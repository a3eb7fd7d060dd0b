"""What of a run goes together with images; everything else is refused in a sentence before it is planned."""

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError


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
        f"parallel.sequence_parallel_size={parallel.sequence_parallel_size}": parallel.sequence_parallel,
    }
    return next((setting for setting, excluded in settings.items() if excluded), None)
