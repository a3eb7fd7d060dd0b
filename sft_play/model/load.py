"""Loads what a model is without its weights: architecture, tokenizer, and the data that they are for."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PretrainedConfig

from sft_play.config.schema import ModelConfig, RunConfig
from sft_play.data.prepare import PreparedData, first_day, prepare
from sft_play.errors import ConfigError, first_line
from sft_play.model.architecture.published import MODELS_FILE, asked_before_the_hub, similar_name
from sft_play.model.architecture.rope import with_rope_scaling
from sft_play.model.architecture.shape import (
    empty_model,
    know_multimodal,
    require_decoder,
    require_few_layers,
    require_sound_sizes,
)
from sft_play.model.new_tokens import NewToken, add_new_tokens, rows_for, with_rows
from sft_play.model.weights.files import (
    FROM_EITHER,
    NEITHER,
    TOKENIZER_FILES,
    has_tokenizer,
    stored_types,
    unpinned_code,
)
from sft_play.runlog import continued_run
from sft_play.spelling import login, make
from sft_play.units import SHORT_NAMES
from sft_play.upstream.huggingface_hub import limit_network
from sft_play.vision.families import Recipe
from sft_play.vision.recipes import recipe_for
from sft_play.vision.support import require_supported

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def hub_arguments(model: ModelConfig) -> dict[str, str | bool | None]:
    """What every `from_pretrained` is called with.

    Raises:
        ConfigError: the model's code may be run, but its commit is not pinned.
    """
    limit_network()
    arguments = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
    if not model.trust_remote_code:
        return arguments
    if repository := unpinned_code(model.name, model.revision):
        raise ConfigError(
            f"model.trust_remote_code=true runs the Python code of '{repository}' here, and model.revision="
            f"{model.revision or 'null'} lets that code change: set model.revision to the full id (40 hex "
            f"digits) of the commit that you read, from https://huggingface.co/{repository}/commits"
        )
    return arguments | {"code_revision": model.revision}


def not_loadable(what: str, model: ModelConfig, error: Exception) -> ConfigError:
    """The error for a part of a model that a library could not load, with what to do about it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    reason = lines[0]
    if reason.endswith(":") and lines[1:]:  # the strict configs of transformers say on the next what is wrong
        reason += f" {lines[1].strip()}"
    if reason.startswith("Repo id must"):
        reason = f"it is {NEITHER}"
    hint = FROM_EITHER
    if "couldn't connect" in str(error).lower() or "offline mode" in str(error):
        reason = "the Hub is not reachable, and it is not in the local cache"
        planned = f"`{make('plan', MODEL='...')}` plans without either"
        hint = f"use a local folder, or connect to the network; {planned}"
    similar = similar_name(model.name)
    if similar and not Path(model.name).exists():
        hint = f"did you mean model.name={similar}?"
    if "gated repo" in str(error):
        page = f"https://huggingface.co/{model.name}"
        hint = f"accept the license at {page}, then run `{login()}` or set HF_TOKEN"
    if "trust_remote_code" in str(error):
        hint = (
            "the model has Python code of its own: read it, then set model.trust_remote_code=true to run it; "
            "for a model on the Hub also set model.revision=<commit>"
        )
    return ConfigError(f"model.name: the {what} of '{model.name}' cannot be loaded: {reason[:300]}\n{hint}")


def _require_generation_config(folder: Path) -> None:
    """Checks generation_config.json, if there is one; transformers ignores what is no JSON without a word."""
    path = folder / "generation_config.json"
    if not path.exists():
        return
    remedy = "copy the file again, or remove it if config.json has the eos_token_id"
    try:
        ends = GenerationConfig.from_pretrained(str(folder)).eos_token_id
    except Exception as error:  # a wrong value raises anything
        raise ConfigError(
            f"model.name: {path} cannot be used: {first_line(error)[:300]}; {remedy}"
        ) from error
    listed = ends if isinstance(ends, list) else [ends]
    if any(end is not None and (type(end) is not int or end < 0) for end in listed):
        raise ConfigError(
            f"model.name: eos_token_id in {path} is {str(ends)[:100]!r}, which is not a token; {remedy}"
        )


def load_model_config(model: ModelConfig) -> PretrainedConfig:
    """The architecture (config.json) from a folder or the hub, with rows for model.new_tokens.

    Raises:
        ConfigError: there is none, it cannot be loaded, it is of no decoder, or its sizes make no sense; the
            generation_config.json beside it cannot be used; or as in `new_tokens`.
    """
    folder = Path(model.name)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.name: {folder} has no config.json; use a folder from save_pretrained(), or a Hub name"
        )
    try:
        tree, _ = PretrainedConfig.get_config_dict(model.name, **hub_arguments(model))
        require_few_layers(tree, model.name)
        config = AutoConfig.from_pretrained(model.name, **hub_arguments(model))
    except ConfigError:
        raise
    except Exception as error:  # the classes of architectures raise anything
        raise not_loadable("config", model, error) from error
    _require_generation_config(folder)
    require_decoder(config)
    require_sound_sizes(config, model.name)
    return with_rows(with_rope_scaling(config, model), rows_for(new_tokens(model)))


def published_dtype(model: ModelConfig) -> str:
    """The type of a base, e.g. "bfloat16": that of most of its stored weights.

    If they are not on this machine, or quantized, the type that its config says; bfloat16 if it is none in
    which a model is saved.
    """
    stored, names = stored_types(model), {short.upper(): name for name, short in SHORT_NAMES.items()}
    if stored and (name := names.get(max(stored, key=stored.__getitem__))):
        return name
    said = str(load_model_config(model).dtype or "float32").removeprefix("torch.")
    return said if said in SHORT_NAMES else "bfloat16"


def saved_dtype(config: RunConfig) -> str:
    """The type in which a whole model is to be saved, merged or fully fine-tuned."""
    return published_dtype(config.model) if config.output.dtype == "auto" else config.output.dtype


def position_limit(config: PretrainedConfig) -> int | None:
    """The longest sequence in tokens that the architecture supports; None if it does not say."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def load_tokenizer(model: ModelConfig) -> "PreTrainedTokenizerBase":
    """The tokenizer with model.new_tokens; without a padding token, it pads with the end-of-sequence token.

    Raises:
        ConfigError: it cannot be loaded, or has no end-of-sequence token, or has one of the new tokens.
    """
    folder = Path(model.name)
    if folder.is_dir() and not has_tokenizer(folder):
        raise ConfigError(f"model.name: {folder} has no tokenizer (one of {', '.join(TOKENIZER_FILES)})")
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.name, **hub_arguments(model))
    except Exception as error:  # tokenizers raises plain exceptions
        raise not_loadable("tokenizer", model, error) from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"model.name: the tokenizer of '{model.name}' has no eos_token, so the model could never learn "
            "to stop"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    add_new_tokens(tokenizer, model.new_tokens)
    return tokenizer


def _require_rows(tokenizer: "PreTrainedTokenizerBase", known: int) -> None:
    """Raises a ConfigError if the model, which knows so many tokens, has no row for one that we put in."""
    for name in ("eos_token", "bos_token", "pad_token"):
        token, token_id = getattr(tokenizer, name), getattr(tokenizer, f"{name}_id")
        if token_id is not None and token_id >= known:
            other = f", or set {name} to {tokenizer.eos_token!r} in tokenizer_config.json"
            raise ConfigError(
                f"model.name: the {name} of the tokenizer of '{tokenizer.name_or_path}' is {token!r}, token "
                f"{token_id}, but the model has only the tokens 0 to {known - 1}: it was added to the "
                "tokenizer alone.\nGive the model a row for it, resize_token_embeddings(len(tokenizer)) and "
                f"save_pretrained() of both into one folder{other if name == 'pad_token' else ''}"
            )


def without_new_tokens(model: ModelConfig) -> ModelConfig:
    """The model as it was published."""
    return model.model_copy(update={"new_tokens": ()})


def new_tokens(model: ModelConfig) -> tuple[NewToken, ...]:
    """The tokens of model.new_tokens; errors as in `load_tokenizer`."""
    known = without_new_tokens(model)
    return add_new_tokens(load_tokenizer(known), model.new_tokens) if model.new_tokens else ()


def scaled_config(model: ModelConfig) -> dict[str, "PretrainedConfig"]:
    """The argument of `from_pretrained` for model.rope_scaling; none without it."""
    return {"config": load_model_config(without_new_tokens(model))} if model.rope_scaling else {}


def empty_base(model: ModelConfig, **settings: object) -> "PreTrainedModel":
    """The base on the meta device, in which an adapter can be tried before weights are loaded.

    Its config.json is enough; the settings are further ones of `from_config`.
    """
    config, trusted = load_model_config(model), hub_arguments(model)
    del trusted["revision"]  # config.json has been read
    return empty_model(config, attn_implementation="eager", **trusted, **settings)


def planning_config(model: ModelConfig) -> tuple["PretrainedConfig", list[str]]:
    """The architecture for a plan, and a note if it is a published one instead of the model's own file.

    A model's own config.json comes first if it is on this machine. The published one comes before the Hub:
    it is the same, and needs neither network nor access. Without a tokenizer, each new token is assumed to
    need a row of its own.
    """
    plain = without_new_tokens(model)
    config, notes = _known_config(plain)
    if not model.new_tokens:
        return config, notes
    try:
        tokenizer = None if notes else load_tokenizer(plain)  # with notes, the Hub was not asked
    except ConfigError:
        tokenizer = None
    rows = config.get_text_config().vocab_size + len(model.new_tokens)
    if tokenizer is not None:
        rows = rows_for(add_new_tokens(tokenizer, model.new_tokens))
    return with_rows(config, rows), notes


def _known_config(model: ModelConfig) -> tuple["PretrainedConfig", list[str]]:
    known = asked_before_the_hub(model)
    if known is None:
        return load_model_config(model), []
    note = f"architecture of {known.name} as of {known.date}, from {MODELS_FILE.name}; the Hub was not asked"
    access = [f"to train it, {known.access}"] if known.gated else []
    config = AutoConfig.for_model(**known.config)
    know_multimodal(config)
    return with_rope_scaling(config, model), [note, *access]


def load_recipe(
    config: RunConfig, architecture: "PretrainedConfig", tokenizer: "PreTrainedTokenizerBase"
) -> Recipe | str:
    """How the model of a run takes pictures, or why it takes none.

    Raises:
        ConfigError: data.image_max_pixels is less than each picture has.
    """
    model = config.model
    return recipe_for(architecture, tokenizer, model.name, model.revision, config.data.image_max_pixels)


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
    started: bool = False,
    trained: bool = False,
) -> LoadedData:
    """Tokenizes the data of a run, or loads it from the cache; `progress` and `hashes` are for `prepare`.

    A chat template that writes the date writes that of the day on which the run that is resumed began. With
    `started`, the run is one that has, whatever train.resume says. If rows are to be `trained`, settings that
    do not go together with their images are an error.

    Raises:
        ConfigError: config.json or tokenizer cannot be loaded, or the model has no row for a token of the
            tokenizer or of the data; or as in `prepare`.
        DataError: as in `prepare`.
    """
    architecture = architecture or load_model_config(config.model)
    tokenizer = load_tokenizer(config.model)
    known = architecture.get_text_config().vocab_size
    _require_rows(tokenizer, known)
    run = Path(config.output.dir) / config.output.name
    day = first_day(run if started else continued_run(run, config.train.resume))
    limit = position_limit(architecture)
    recipe = load_recipe(config, architecture, tokenizer)
    rows = prepare(
        config, tokenizer, model_limit=limit, recipe=recipe, progress=progress, hashes=hashes, day=day
    )
    if trained:
        require_supported(config, architecture.model_type, seen="pictures" in rows.train.column_names)
    largest = rows.stats["largest_token_id"]
    if largest >= known:
        raise ConfigError(
            f"the tokenizer produced token {largest}, but the model has only {known} tokens: they do not "
            "belong together; set model.name to a folder or repository whose tokenizer and weights were "
            "saved together"
        )
    return LoadedData(architecture, tokenizer, rows)
