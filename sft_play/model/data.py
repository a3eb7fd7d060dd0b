"""Loads architecture, tokenizer and tokenized data of a run together, and checks that they match."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sft_play.config.schema import RunConfig
from sft_play.data.prepare import PreparedData, prepare
from sft_play.errors import ConfigError
from sft_play.model.load import load_model_config, load_tokenizer, position_limit

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


@dataclass(frozen=True)
class LoadedData:
    """Tokenized rows, with the tokenizer and the architecture that they are for."""

    architecture: "PretrainedConfig"
    tokenizer: "PreTrainedTokenizerBase"
    rows: PreparedData


def load_data(
    config: RunConfig,
    architecture: "PretrainedConfig | None" = None,
    *,
    progress: bool = True,
    hashes: bool = True,
) -> LoadedData:
    """Tokenizes the data of a run, or loads it from the cache.

    Args:
        config: of the run.
        architecture: of the model, if it is loaded already.
        progress: show a progress bar.
        hashes: as in `prepare`.

    Raises:
        ConfigError: config.json or tokenizer cannot be loaded, or do not belong together; or as in `prepare`.
        DataError: as in `prepare`.
    """
    architecture = architecture or load_model_config(config.model)
    tokenizer = load_tokenizer(config.model)
    rows = prepare(
        config, tokenizer, model_limit=position_limit(architecture), progress=progress, hashes=hashes
    )
    known, largest = architecture.get_text_config().vocab_size, rows.stats["largest_token_id"]
    if largest >= known:
        raise ConfigError(
            f"the tokenizer produced token {largest}, but the model has only {known} tokens: they do not "
            "belong together; set model.name to a folder or repository whose tokenizer and weights were "
            "saved together"
        )
    return LoadedData(architecture, tokenizer, rows)
