"""Tokens that a run adds to the vocabulary: their ids and pieces, and their rows in the model.

A row starts as the mean of the rows of the pieces that the token was split into. Where the model has spare
rows, as many do, they are used; else embedding and output head grow. Full fine-tuning trains all rows, and
beside adapters PEFT trains these rows alone (trainable_token_indices).
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sft_play.errors import ConfigError, first_line
from sft_play.units import listed

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

LISTED = 8  # tokens in a message
TOLERANCE = 1e-3  # between two ways to compute the same rows, of the largest value


@dataclass(frozen=True)
class NewToken:
    """A token that was added to a tokenizer."""

    text: str
    id: int
    pieces: tuple[int, ...]  # ids of the tokens that the text was split into before, without unknown ones


def add_new_tokens(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> tuple[NewToken, ...]:
    """Adds tokens to a tokenizer; none of them is special, so they are part of decoded answers.

    Raises:
        ConfigError: a text is a token already, or the tokenizer has no room for it.
    """
    if not texts:
        return ()
    from transformers import AddedToken

    known = tokenizer.get_vocab()
    pieces = {text: _pieces(tokenizer, text) for text in texts}
    there = [text for text in texts if text in known or len(pieces[text]) == 1]
    if there:
        are, them = ("is already a token", "it") if len(there) == 1 else ("are already tokens", "them")
        named = listed([repr(text) for text in there], LISTED)
        raise ConfigError(
            f"model.new_tokens: {named} {are} of this tokenizer; remove {them} from model.new_tokens"
        )
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in texts])
    id_of: Any = tokenizer.convert_tokens_to_ids
    found = [NewToken(text, id_of(text), pieces[text]) for text in texts]
    taken = {token.id for token in found} & set(known.values())
    if taken or len({token.id for token in found}) < len(texts):
        raise ConfigError(
            f"model.new_tokens: this tokenizer numbers its tokens with gaps, so that {len(texts)} more would "
            "take the places of others; use another model, or leave model.new_tokens out"
        )
    return tuple(found)


def _pieces(tokenizer: "PreTrainedTokenizerBase", text: str) -> tuple[int, ...]:
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return tuple(index for index in ids if index != tokenizer.unk_token_id)


def with_rows(config: "PretrainedConfig", rows: int) -> "PretrainedConfig":
    """The architecture with at least so many rows in embedding and output head."""
    if rows <= config.get_text_config().vocab_size:
        return config
    larger = copy.deepcopy(config)
    larger.get_text_config().vocab_size = rows
    return larger


def rows_for(tokens: Iterable[NewToken]) -> int:
    """How many rows a model with these tokens has at least."""
    return max((token.id + 1 for token in tokens), default=0)


def add_rows(model: "PreTrainedModel", tokens: Sequence[NewToken]) -> None:
    """Sets the rows of the tokens in embedding and output head, which grow if they have too few.

    Raises:
        ConfigError: the rows of this architecture cannot be changed.
    """
    if not tokens:
        return
    embedding: Any = model.get_input_embeddings()
    known = min(token.id for token in tokens)  # rows of tokens that the model was trained on
    if rows_for(tokens) > len(embedding.weight):
        try:
            model.resize_token_embeddings(rows_for(tokens), mean_resizing=False)
        except (NotImplementedError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise ConfigError(
                f"model.new_tokens: the embedding of {type(model).__name__} cannot grow: "
                f"{first_line(error)}; leave model.new_tokens out"
            ) from error
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    matrices = {id(matrix): matrix for matrix in (embedding.weight, head.weight)}
    bias = [] if getattr(head, "bias", None) is None else [head.bias]
    for rows in [*matrices.values(), *bias]:
        for token in tokens:
            source = rows.data[list(token.pieces)] if token.pieces else rows.data[:known]
            rows.data[token.id] = source.mean(0, dtype=torch.float32).to(rows.dtype)


def trained_rows(model: "PreTrainedModel", ids: Sequence[int]) -> dict[str, list[int]] | None:
    """PEFT's trainable_token_indices: the rows of the embedding, and of the head if it is not tied to it.

    Raises:
        ConfigError: PEFT does not do what the output head of this model does.
    """
    if not ids:
        return None
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise ConfigError(
            f"model.new_tokens: the output head of {type(model).__name__} has a bias, which PEFT leaves out "
            "where it trains rows of a head; set tuning.mode=full, or leave model.new_tokens out"
        )
    layers = [embedding] if head.weight is embedding.weight else [embedding, head]
    return {name_of(model, layer): list(ids) for layer in layers}


def name_of(model: torch.nn.Module, layer: torch.nn.Module) -> str:
    """The name of a module of the model."""
    return next(name for name, module in model.named_modules() if module is layer)


def complete_wrappers(model: "PeftModel") -> None:
    """Gives PEFT's wrapper of an output head the bias that TRL's head asks for: none."""
    from peft.utils.other import TrainableTokensWrapper

    head: Any = model.get_output_embeddings()
    if isinstance(head, TrainableTokensWrapper):
        head.bias = None  # type: ignore[assignment]


def require_wrapped(model: "PeftModel") -> None:
    """Raises a ConfigError if PEFT's wrappers of single rows do not compute what embedding and head do.

    It also does if the head is not tied to the embedding any more.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    base: Any = model.get_base_model()
    weights = [getattr(layer, "original_module", layer).weight for layer in (embedding, head)]
    tied = getattr(getattr(head, "token_adapter", None), "tied_adapter", None) is not None
    if tied != (weights[0] is weights[1]):
        raise ConfigError(
            f"model.new_tokens: PEFT does not see how embedding and output head of {type(base).__name__} are "
            "tied; set tuning.mode=full, or leave model.new_tokens out"
        )
    if weights[0].is_meta:
        return
    ids, hidden = torch.tensor([0, 1]), torch.ones(1, weights[1].shape[1], dtype=weights[1].dtype)
    for layer, inputs in ((embedding, ids), (head, hidden)):
        with torch.no_grad():
            wrapped, own = layer(inputs.to(base.device)), layer.original_module(inputs.to(base.device))
        if (wrapped - own).abs().max() > TOLERANCE * own.abs().max():
            raise ConfigError(
                f"model.new_tokens: PEFT does not compute what {type(layer.original_module).__name__} of "
                f"{type(base).__name__} does; set tuning.mode=full, or leave model.new_tokens out"
            )
