"""docs/reference/config.md, made from the schema: every key with its type, limits, default and meaning."""

import json
import re
from typing import Any, get_origin

from pydantic import BaseModel

from sft_play.config.load import section_of
from sft_play.config.schema import RunConfig

HEAD = """# Settings

Every key of a config file (`make docs` writes this page from `sft_play/config/schema.py`). Set a key in the
YAML file of the run (`section:` and below it `key: value`), or for one run on the command line:
`ARGS="train.learning_rate=1e-4"`. Write lists in brackets. `include: other.yaml` takes the settings of
another file, which this one overrides. Unknown keys are errors. Keys without a default are required.
"""
NAMES = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false"}
LIMITS = {"exclusiveMinimum": "> ", "minimum": ">= ", "exclusiveMaximum": "< ", "maximum": "<= "}


def reference() -> str:
    """The page, in Markdown."""
    return HEAD + "".join(_section(RunConfig, "", "config"))


def _section(model: type[BaseModel], prefix: str, title: str) -> list[str]:
    """The tables of a section and of the sections in it."""
    properties = model.model_json_schema()["properties"]
    rows, below = [], []
    for name, field in model.model_fields.items():
        inner = section_of(field.annotation)
        key = f"{prefix}{name}"
        is_list = inner is not None and get_origin(field.annotation) is tuple
        if inner is not None:
            below += _section(inner, f"{key}[]." if is_list else f"{key}.", key)
        if inner is None or field.annotation is not inner:
            rows.append(_row(key, field.description, properties[name], field.is_required()))
    if not rows:
        return below
    about = " ".join((model.__doc__ or "").split())
    table = "| key | type | default | what it does |\n|---|---|---|---|\n" + "".join(rows)
    return [f"\n## {title}\n\n{about}\n\n{table}", *below]


def _row(key: str, description: str | None, tree: dict[str, Any], required: bool) -> str:
    default = "required" if required else f"`{_default(tree.get('default'))}`"
    meaning = " ".join((description or "").split()).replace("<", "&lt;")
    cells = (f"`{key}`", _kind(tree), default, meaning)
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |\n"


def _default(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _kind(tree: dict[str, Any]) -> str:
    """The type of a value and its limits, in words."""
    if "anyOf" in tree:
        kinds = dict.fromkeys(_kind(part) for part in tree["anyOf"] if part.get("type") != "null")
        return ", ".join(kinds)
    if "$ref" in tree:
        return "section, see below"
    if "enum" in tree or "const" in tree:
        return ", ".join(f"`{value}`" for value in tree.get("enum", [tree.get("const")]))
    if tree["type"] == "array":
        return f"list of {_kind(tree['items'])}".replace("list of section,", "list of sections,")
    if tree["type"] == "object":
        return f"{_kind(tree['additionalProperties'])} by name"
    limits = [f"{sign}{_limit(tree[name])}" for name, sign in LIMITS.items() if name in tree]
    pattern = [f"like `{tree['pattern']}`"] if "pattern" in tree else []
    return " ".join([NAMES[tree["type"]], *limits, *pattern])


def _limit(value: float) -> str:
    """A limit as a person writes it: 2^31, not 2147483648."""
    power = int(value).bit_length() - 1
    is_power = power > 16 and value == 2**power
    return f"2^{power}" if is_power else re.sub(r"\.0$", "", str(value))
