"""An architecture as the planner sees it: once it is known, neither torch nor transformers is imported."""

import json
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, Union

from pydantic import TypeAdapter

from sft_play.cache import recall, remember
from sft_play.config.schema import ModelConfig
from sft_play.errors import ConfigError
from sft_play.machine.process import importing_libraries
from sft_play.model.architecture.published import asked_before_the_hub
from sft_play.model.weights.files import model_key
from sft_play.sizing.facts.model_facts import ModelFacts, ModuleFacts, model_facts, module_facts
from sft_play.ui.progress import LIBRARIES, spinner

if TYPE_CHECKING:
    from transformers import PretrainedConfig

T = TypeVar("T")
About = TypeVarTuple("About")
AnyArchitecture = Union["Architecture", "PretrainedConfig"]
CONFIG = "config"  # the question what a model's architecture is


class Architecture:
    """An architecture: its config, loaded when it is needed, and answers about it, kept on disk."""

    def __init__(self, text: str, load: Callable[[], "PretrainedConfig"], *, keeps: bool = True):
        """`text` is the whole config as JSON, `load` gives the config, `keeps` is for answers."""
        self.text, self._load, self.keeps = text, load, keeps

    @classmethod
    def of(cls, config: AnyArchitecture) -> "Architecture":
        """The architecture of a loaded config; nothing is kept of one with code of its own."""
        if isinstance(config, Architecture):
            return config
        loaded: PretrainedConfig = config
        library = type(loaded).__module__.startswith("transformers.models.")
        return cls(text_of(loaded), lambda: loaded, keeps=library)

    @cached_property
    def config(self) -> "PretrainedConfig":
        """The config."""
        return self._load()

    @cached_property
    def facts(self) -> ModelFacts:
        """What its config tells."""
        return self.ask(model_facts)

    @cached_property
    def modules(self) -> ModuleFacts:
        """What its modules tell, which takes a second or so to find out."""
        return self.ask(module_facts)

    def ask(self, question: Callable[["PretrainedConfig", *About], T], *about: *About) -> T:
        """The answer to one of `step_facts`, kept or found now; raises what the question does."""
        kind = _kind_of(question)
        known = recall(question.__name__, self.text, *about) if self.keeps else None
        if known is not None:
            return kind.validate_python(known[0])
        with importing_libraries():
            answer = question(self.config, *about)
        if self.keeps:
            remember([kind.dump_python(answer, mode="json")], question.__name__, self.text, *about)
        return answer


@cache
def _kind_of(question: Callable[..., Any]) -> TypeAdapter[Any]:
    return TypeAdapter(question.__annotations__["return"])


def text_of(config: "PretrainedConfig") -> str:
    """The whole config as JSON, without the place that it was loaded from."""

    def without_place(tree: dict[str, object]) -> dict[str, object]:
        tree.pop("_name_or_path", None)
        return tree

    return json.dumps(json.loads(config.to_json_string(use_diff=False), object_hook=without_place))


def planning_architecture(model: ModelConfig) -> tuple[Architecture, list[str]]:
    """The architecture for a plan, and notes: what `planning_config` gives or, if that is kept, gave."""
    key = _key(model)
    known = recall(CONFIG, key) if key else None
    if known:
        text, notes = known
        return Architecture(text, lambda: _same_config(model, text)), notes
    with spinner(LIBRARIES), importing_libraries():
        from sft_play.model.load import planning_config

        config, notes = planning_config(model)
    found = Architecture.of(config)
    if key and key == _key(model):  # no file came or changed meanwhile
        remember([found.text, notes], CONFIG, key)
    return found, notes


def _key(model: ModelConfig) -> str | None:
    """All that the answer of `planning_config` depends on; None if that cannot be told."""
    published = asked_before_the_hub(model)
    if published:
        return f"{model.model_dump_json()} {published}"
    # New tokens are guessed at if the Hub does not give out the tokenizer, which may be for now alone.
    return model_key(model) if not model.new_tokens or Path(model.name).is_dir() else None


def _same_config(model: ModelConfig, text: str) -> "PretrainedConfig":
    """The config of a model.

    Raises:
        ConfigError: it is another than a moment ago.
    """
    from sft_play.model.load import planning_config

    config, _ = planning_config(model)
    if text_of(config) != text:
        raise ConfigError(
            f"model.name: the config of '{model.name}' changed while the run was planned; run the command "
            "again"
        )
    return config
