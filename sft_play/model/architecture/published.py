"""Architectures of published models, from configs/models.yaml: all that a plan needs if the Hub is not asked.

Planning needs config.json alone, but the Hub gives out no file of a gated model without a license agreement,
and may not be reachable at all.
"""

import difflib
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.config.schema import ModelConfig
from sft_play.errors import ConfigError
from sft_play.machine.catalogue import read_shipped
from sft_play.resources import CONFIGS
from sft_play.spelling import login, var

MODELS_FILE = CONFIGS / "models.yaml"


@dataclass(frozen=True)
class PublishedModel:
    """A model on the Hub: its name there, and what its config.json says about memory and speed."""

    name: str
    parameters: int
    gated: bool  # whether the Hub wants a license agreement first
    config: dict[str, Any]
    source: str  # URL
    date: str  # of the source

    @property
    def access(self) -> str:
        """What to do before the model can be downloaded; "" if nothing."""
        if not self.gated:
            return ""
        page = f"https://huggingface.co/{self.name}"
        return f"accept its license at {page}, then run `{login()}` or set HF_TOKEN"


@functools.cache
def published_models() -> dict[str, PublishedModel]:
    """All models by their names on the Hub, in lower case; errors are those of `read_shipped`."""
    tree, found = read_shipped(MODELS_FILE), {}
    for entry in tree["models"]:
        source = tree["sources"][entry["source"]]
        for name in (entry["name"], *entry.get("same", ())):
            found[name.lower()] = PublishedModel(
                name=name,
                parameters=entry["parameters"],
                gated=entry.get("gated", False),
                config=entry["config"],
                source=source["url"],
                date=str(source["date"]),
            )
    return found


def hub_name(typed: str) -> str:
    """The name on the Hub for what was typed, which may lack the organization, or an end: "qwen3-vl-8b".

    Folders and names with an organization are returned as they are.

    Raises:
        ConfigError: no published model has this name; names the closest.
    """
    if "/" in typed or Path(typed).is_dir():
        return typed
    by_short_name = {name.rpartition("/")[2]: model for name, model in published_models().items()}
    if typed.lower() in by_short_name:
        return by_short_name[typed.lower()].name
    longer = [model for name, model in by_short_name.items() if name.startswith(f"{typed.lower()}-")]
    if longer and all(model.config == longer[0].config for model in longer):
        return longer[0].name
    close = difflib.get_close_matches(typed.lower(), by_short_name, n=4, cutoff=0.0)
    names = ", ".join(by_short_name[name].name for name in close)
    raise ConfigError(
        f"{var(MODEL=typed)} is unknown; closest: {names}. Use one of these, a name with its organization "
        "(Qwen/Qwen3-8B), or a folder with a config.json"
    )


def asked_before_the_hub(model: ModelConfig) -> PublishedModel | None:
    """The published model that serves for a plan, since nothing of this model is on this machine."""
    if model.revision or Path(model.name).is_dir():
        return None
    from huggingface_hub import try_to_load_from_cache

    known = published_models().get(model.name.lower())
    cached = known and try_to_load_from_cache(model.name, "config.json", revision=model.revision)
    return None if isinstance(cached, str) else known


def similar_name(typed: str) -> str | None:
    """The published model whose name, with or without its organization, is closest to another name."""
    names = {}
    for name, model in published_models().items():
        names[name] = names[name.rpartition("/")[2]] = model.name
    close = difflib.get_close_matches(typed.lower(), names, n=1, cutoff=0.85)
    found = names[close[0]] if close else None
    return found if found != typed else None
