"""YAML file + overrides -> RunConfig, with the origin of every value, and all problems reported at once."""

import difflib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError

MAX_FILE_BYTES = 1_000_000
MAX_INCLUDE_DEPTH = 8


@dataclass(frozen=True)
class ResolvedConfig:
    """A validated config and where each of its values came from (dotted name -> "default", a file, or "override")."""

    config: RunConfig
    origins: dict[str, str]
    path: Path


class _Loader(yaml.SafeLoader):
    """YAML as people read it: 2e-4 is a number, `no` and `on` are words, 010 is ten, a repeated key is an error."""

    yaml_implicit_resolvers: dict = {}


_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]+$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^(?:[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict:
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        line = key_node.start_mark.line + 1
        if key_node.value in seen:
            raise ConfigError(f"line {line}: key '{key_node.value}' stands already in line {seen[key_node.value]}; keep one")
        seen[key_node.value] = line
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


def _no_alias(loader: _Loader, node: yaml.Node) -> None:
    raise ConfigError(f"line {node.start_mark.line + 1}: YAML tag {node.tag} is not allowed in a config")


_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value, 10))
_Loader.add_constructor(None, _no_alias)


def parse_yaml(text: str, source: str) -> Any:
    """Parses `text` with the loader above.

    Raises:
        ConfigError: names `source` and the line.
    """
    try:
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text, Loader=_Loader)):
            raise ConfigError("YAML aliases (*name) are not allowed in a config; use include: for shared settings")
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader subclass
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}, line {mark.line + 1}" if mark else source
        raise ConfigError(f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from None


def _read_file(path: Path) -> dict:
    if not path.is_file():
        found = sorted(str(p) for p in Path("configs").glob("*.yaml")) if Path("configs").is_dir() else []
        hint = f" Shipped configs: {', '.join(found)}." if found else ""
        raise ConfigError(f"config file {path} does not exist.{hint} Choose one with CONFIG=path.yaml")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ConfigError(f"config file {path} has {path.stat().st_size} bytes; at most {MAX_FILE_BYTES} are allowed")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from None
    tree = parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected sections (model:, data:, ...), found {type(tree).__name__}")
    return tree


def _leaves(tree: dict, prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat.update(_leaves(value, f"{name}."))
        else:
            flat[name] = value
    return flat


def _merge(base: dict, over: dict) -> dict:
    merged = dict(base)
    for key, value in over.items():
        both_trees = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both_trees else value
    return merged


def _load_tree(path: Path, depth: int = 0) -> tuple[dict, dict[str, str]]:
    """The file with its includes merged under it, and the origin of each leaf."""
    if depth > MAX_INCLUDE_DEPTH:
        raise ConfigError(f"{path}: include: goes deeper than {MAX_INCLUDE_DEPTH} files; is there a circle?")
    tree = _read_file(path)
    base: dict = {}
    origins: dict[str, str] = {}
    includes = tree.pop("include", [])
    for name in [includes] if isinstance(includes, str) else includes:
        included, included_origins = _load_tree(path.parent / str(name), depth + 1)
        base = _merge(base, included)
        origins.update(included_origins)
    origins.update(dict.fromkeys(_leaves(tree), str(path)))
    return _merge(base, tree), origins


def apply_override(tree: dict, override: str) -> str:
    """Writes `section.key=value` into `tree` and returns the dotted name."""
    name, equals, text = override.partition("=")
    if not equals or not re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)+", name):
        raise ConfigError(f"override '{override}' is not of the form section.key=value, e.g. train.learning_rate=1e-4")
    *sections, key = name.split(".")
    for section in sections:
        child = tree.setdefault(section, {})
        if not isinstance(child, dict):
            raise ConfigError(f"override '{override}': {section} is a value, not a section")
        tree = child
    tree[key] = parse_yaml(text, f"override '{override}'") if text else None
    return name


def _keys_of(section: tuple) -> list[str]:
    model: Any = RunConfig
    for part in section:
        model = model.model_fields[part].annotation
    return list(model.model_fields)


def _nearest(key: str, section: tuple) -> str:
    allowed = _keys_of(section)
    close = difflib.get_close_matches(key, allowed, n=1, cutoff=0.5)
    if close:
        return f"unknown key; did you mean {'.'.join([*map(str, section), close[0]])}?"
    for other in RunConfig.model_fields:  # the right key in the wrong section
        if (not section or other != section[0]) and key in _keys_of((other,)):
            return f"unknown key here; it belongs to {other}.{key}"
    return f"unknown key; allowed are {', '.join(allowed)}"


def _allowed_text(name: tuple) -> str:
    """What a field takes, in words, from its annotation."""
    model: Any = RunConfig
    for part in name[:-1]:
        model = model.model_fields[part].annotation
    text = str(model.model_json_schema()["properties"].get(name[-1], ""))
    words = []
    if "'integer'" in text:
        words.append("a whole number above 0" if "exclusiveMinimum" in text else "a whole number")
    if "'boolean'" in text:
        words.append("true or false")
    words += re.findall(r"'const': '(\w+)'", text)
    return " or ".join(words)


def _problems(error: ValidationError) -> list[str]:
    """One line for each wrong field: dotted name, what was found, what is allowed."""
    lines: dict[str, str] = {}
    for item in error.errors():
        path = item["loc"]
        depth = 0  # a union adds its branches to the path; cut them off
        model: Any = RunConfig
        while depth < len(path) and isinstance(model, type) and issubclass(model, BaseModel):
            field = model.model_fields.get(str(path[depth]))
            depth += 1
            if field is None:
                break
            model = field.annotation
        name = tuple(str(part) for part in path[:depth])
        dotted = ".".join(name) or "config"
        if item["type"] == "extra_forbidden":
            lines[dotted] = _nearest(name[-1], name[:-1])
        elif item["type"] == "missing":
            lines[dotted] = "is required"
        else:
            message = item["msg"].removeprefix("Value error, ")
            message = message[0].lower() + message[1:]
            if depth < len(path) or dotted in lines:
                message = f"expected {_allowed_text(name) or message}"
            found = "" if isinstance(item["input"], dict | BaseModel) else f" (found {json.dumps(item['input'], default=str)})"
            lines[dotted] = message + found
    return [f"{name}: {text}" for name, text in lines.items()]


def load_config(path: str | Path, overrides: list[str] | None = None) -> ResolvedConfig:
    """Reads a YAML config with its includes, applies `section.key=value` overrides, validates.

    Raises:
        ConfigError: lists every problem with its dotted name.
    """
    path = Path(path)
    tree, origins = _load_tree(path)
    for override in overrides or []:
        origins[apply_override(tree, override)] = "override"
    if isinstance(tree.get("output"), dict) or "output" not in tree:
        tree.setdefault("output", {}).setdefault("name", path.stem)
        origins.setdefault("output.name", "default")
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        problems = _problems(error)
        head = f"{path}: {len(problems)} problem{'s' if len(problems) > 1 else ''} in the config"
        raise ConfigError("\n  ".join([head, *problems]) + "\n`sft-play config-schema` lists every key") from None
    for name in _leaves(config.model_dump()):
        origins.setdefault(name, "default")
    return ResolvedConfig(config, origins, path)


def dump_resolved(resolved: ResolvedConfig) -> str:
    """The whole config as YAML, each value with its origin in a comment; loads back to the same config."""
    lines: list[str] = []

    def write(tree: dict, prefix: str, indent: int) -> None:
        for key, value in tree.items():
            name = f"{prefix}{key}"
            if isinstance(value, dict):
                lines.append(f"{'  ' * indent}{key}:")
                write(value, f"{name}.", indent + 1)
            else:
                lines.append(f"{'  ' * indent}{key}: {json.dumps(value)}  # {resolved.origins.get(name, 'default')}")

    write(resolved.config.model_dump(), "", 0)
    return "\n".join(lines) + "\n"


def json_schema() -> dict:
    """JSON schema of a config file; editors read it through the first line of each shipped YAML."""
    schema = RunConfig.model_json_schema()
    schema["properties"]["include"] = {
        "description": "File or files (relative to this one) whose settings lie under these.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    schema["required"] = []  # an including file may leave the rest to its base
    return schema
