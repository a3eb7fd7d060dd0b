"""YAML file + overrides -> RunConfig, with the origin of every value; all problems are reported at once."""

import difflib
import json
import os
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from sft_play.config.aliases import ALIASES, REMOVED
from sft_play.config.resolved import OF_RUN, no_such_run, stay_in_folder
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, kind_of
from sft_play.resources import located, meant_config
from sft_play.secrets import find_secret
from sft_play.spelling import login, settings_page, var, variable_of
from sft_play.units import counted

MAX_FILE_BYTES = 100_000
MAX_INCLUDE_DEPTH = 8
MAX_DEPTH = 20  # of YAML collections inside each other; a config has three


@dataclass(frozen=True)
class ResolvedConfig:
    """A validated config, and what it was made from."""

    config: RunConfig
    origins: dict[str, str]  # of each value, by dotted name: "default", a file, or "override"
    path: Path
    overrides: tuple[str, ...] = ()  # as typed


class _Loader(yaml.SafeLoader):
    """YAML without surprises: 2e-4 is a number, `no` a string, 010 is ten, duplicate keys are errors."""

    yaml_implicit_resolvers: dict = {}


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]+$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^(?:[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict:
    seen: dict[str, int] = {}
    for key_node, _ in node.value:
        line = key_node.start_mark.line + 1
        if key_node.tag != "tag:yaml.org,2002:str":
            found = repr(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "a list or section"
            raise ConfigError(f"line {line}: expected the name of a setting as the key, found {found}")
        if key_node.value in seen:
            first = seen[key_node.value]
            raise ConfigError(
                f"line {line}: duplicate key '{key_node.value}' (first on line {first}); keep one"
            )
        seen[key_node.value] = line
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


def _reject_tag(loader: _Loader, node: yaml.Node) -> None:
    raise ConfigError(f"line {node.start_mark.line + 1}: YAML tag {node.tag} is not allowed in a config")


_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value, 10))
_Loader.add_constructor(None, _reject_tag)


def _require_plain(text: str) -> None:
    """Refuses aliases and deep nesting, with their line, before anything is built from `text`."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        line = event.start_mark.line + 1 if event.start_mark else 0  # which all events of a text have
        if isinstance(event, yaml.AliasEvent):
            raise ConfigError(
                f"line {line}: YAML aliases (*name) are not allowed in a config; use include: for shared "
                "settings"
            )
        if isinstance(event, yaml.ScalarEvent) and re.search("[\ud800-\udfff]", event.value):
            raise ConfigError(
                f"line {line}: {event.value!a} has an unpaired surrogate, which is not a character"
            )
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ConfigError(f"line {line}: nested more than {MAX_DEPTH} levels deep")


def parse_yaml(text: str, source: str) -> Any:
    """Parses YAML `text`; ConfigError if it is not valid, which names its `source` and the line."""
    try:
        _require_plain(text)
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader subclass
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}, line {mark.line + 1}" if mark else source
        problem = str(getattr(error, "problem", None) or error)
        hint = "; is it indented like its neighbours?" if "<block" in problem else ""
        raise ConfigError(f"{where}: not valid YAML: {problem}{hint}") from None


def _refuse_secret(text: str, where: str) -> None:
    """Refuses tokens: configs are copied, logged and published, and command lines are visible in `ps`."""
    if what := find_secret(text):
        raise ConfigError(
            f"{where}: contains {what}; remove it and set it in the environment instead (HF_TOKEN, "
            f"WANDB_API_KEY), or run `{login()}`"
        )


def _read_file(path: Path) -> dict:
    path = located(path)
    if not os.path.isfile(path):  # noqa: PTH113 - names may be too long for Path.is_file
        if path.name == OF_RUN:
            raise no_such_run(path.parent)
        found = "is a folder" if os.path.isdir(path) else "does not exist"  # noqa: PTH112 - as above
        what = f"config file {path} {found}" if path != Path() else "no config file is named"
        raise ConfigError(f"{what}{meant_config(path)}. Set {var(CONFIG='<file>')}")
    if (size := path.stat().st_size) > MAX_FILE_BYTES:
        raise ConfigError(f"config file {path} has {size} bytes; the limit is {MAX_FILE_BYTES}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from None
    for number, line in enumerate(text.splitlines(), start=1):
        _refuse_secret(line, f"{path}, line {number}")
    tree = parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected sections (model:, data:, ...), found {kind_of(tree)}")
    _leave_out_removed(tree)
    return tree


def _leave_out_removed(tree: dict) -> None:
    for name, value in REMOVED.items():
        section, key = name.split(".")
        found = tree.get(section)
        if isinstance(found, dict) and found.get(key) == value:
            del found[key]


def _leaves(tree: dict, above: tuple = ()) -> dict[str, object]:
    """The settings in a tree of sections, by dotted name."""
    flat: dict[str, object] = {}
    for key, value in tree.items():
        path = (*above, key)
        if isinstance(value, dict) and _section_at(path):
            flat.update(_leaves(value, path))
        else:
            flat[_dotted(path)] = value
    return flat


def _merge(base: dict, over: dict) -> dict:
    merged = dict(base)
    for key, value in over.items():
        both_trees = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both_trees else value
    return merged


def _included(value: object, path: Path) -> list[str]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(
            f"{path}, line {_line_of('include', path)}: include: expected a file name or a list of them, "
            f"found {value!r:.100}"
        )
    return names


def _line_of(key: str, path: Path) -> int:
    """The line of a top-level key of a file that has been read."""
    root: Any = yaml.compose(located(path).read_text(encoding="utf-8"), Loader=_Loader)
    return next(name.start_mark.line + 1 for name, _ in root.value if name.value == key)


def _load_tree(path: Path, depth: int = 0) -> tuple[dict, dict[str, str]]:
    """The settings of a file, merged over those of its includes, and the origin of each."""
    if depth > MAX_INCLUDE_DEPTH:
        raise ConfigError(
            f"{path}: include: is nested more than {MAX_INCLUDE_DEPTH} deep; does a file include itself?"
        )
    tree = _read_file(path)
    base: dict = {}
    origins: dict[str, str] = {}
    for name in _included(tree.pop("include", []), path):
        included, included_origins = _load_tree(path.parent / name, depth + 1)
        base = _merge(base, included)
        origins.update(included_origins)
    origins.update(dict.fromkeys(_leaves(tree), str(path)))
    return _merge(base, tree), origins


def apply_override(tree: dict, override: str) -> str:
    """Applies `section.key=value` to `tree` and returns the dotted name."""
    name, equals, text = override.partition("=")
    if not equals or not re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)+", name):
        example = as_override(name, text) or "train.learning_rate=1e-4"
        raise ConfigError(f"override '{override}' does not have the form section.key=value, e.g. {example}")
    *sections, key = name.split(".")
    for section in sections:
        child = tree.setdefault(section, {})
        if not isinstance(child, dict):
            raise ConfigError(f"override '{override}': {section} is a value, not a section")
        tree = child
    tree[key] = parse_yaml(text, f"override '{override}'") if text else None
    return name


def as_override(name: str, value: str = "") -> str | None:
    """A name without its section, or of another tool, as it is written here with a value; None if unknown.

    `as_override("--lr", "1e-4")` is "train.learning_rate=1e-4".
    """
    key = name.lstrip("-").replace("-", "_")
    sections = (*((section,) for section in RunConfig.model_fields), ("tuning", "lora"))
    owner = next((section for section in sections if key in _keys_of(section)), None)
    setting = _dotted((*owner, key)) if owner else ALIASES.get(key)
    return setting if setting is None or "=" in setting or not value else f"{setting}={value}"


def section_of(annotation: object) -> type[BaseModel] | None:
    """The section in the type of a field: of a section itself, or of a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := section_of(part))), None)


def _section_at(path: tuple) -> Any:
    """The section at a path of names and, in lists, numbers; None if there is no section."""
    section: type[BaseModel] | None = RunConfig
    for part in path:
        if isinstance(part, str) and section:
            field = section.model_fields.get(part)
            section = section_of(field.annotation) if field else None
    return section


def _setting(name: str) -> str:
    """The setting that a dotted name belongs to: itself, or what it is an entry of (rank_pattern.q_proj)."""
    path = tuple(name.split("."))
    while len(path) > 1 and not _section_at(path[:-1]):
        path = path[:-1]
    return _dotted(path)


def _dotted(path: tuple) -> str:
    """`_dotted(("data", "sources", 1, "path"))` is "data.sources[1].path"."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".") or "config"


def _keys_of(section: tuple) -> list[str]:
    return list(_section_at(section).model_fields)


def _nearest(key: str, section: tuple) -> str:
    allowed = _keys_of(section)
    if key in ALIASES and all(isinstance(part, str) for part in section):
        return f"unknown key; did you mean {ALIASES[key]}?"
    if _dotted((*section, key)) in REMOVED:
        return "no longer a setting; leave it out"
    close = difflib.get_close_matches(key, allowed, n=1, cutoff=0.51)
    if close:
        return f"unknown key; did you mean {_dotted((*section, close[0]))}?"
    for other in RunConfig.model_fields:  # the right key in the wrong section
        if (not section or other != section[0]) and key in _keys_of((other,)):
            return f"unknown key in this section; did you mean {other}.{key}?"
    return f"unknown key; allowed: {', '.join(allowed)}"


def _allowed_text(name: tuple) -> str:
    """A description of the allowed values of a field, from its annotation."""
    text = str(_section_at(name[:-1]).model_json_schema()["properties"].get(name[-1], ""))
    allowed = []
    if "'integer'" in text and "additionalProperties" not in text:  # of a mapping, an entry is meant
        allowed.append("a positive integer" if "exclusiveMinimum" in text else "an integer")
    if "'boolean'" in text:
        allowed.append("true or false")
    allowed += re.findall(r"'const': '(\w+)'", text)
    return " or ".join(allowed)


def _problems(error: ValidationError, typed: Container[str]) -> dict[str, str]:
    """Of each invalid field by its dotted name: what is allowed, and what was found unless it was typed."""
    lines: dict[str, str] = {}
    for item in error.errors():
        path = item["loc"]
        depth = 0  # fields in the path; pydantic appends the branch of a union, which is cut off
        while depth < len(path) and _section_at(path[:depth]):
            depth += 1
        name = path[:depth]
        dotted = _dotted(name)
        if item["type"] == "extra_forbidden":
            lines[dotted] = _nearest(str(name[-1]), name[:-1])
        elif item["type"] == "missing":
            lines[dotted] = "is required"
        else:
            message = item["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list")
            message = message[0].lower() + message[1:]
            if depth < len(path) or dotted in lines:
                message = f"expected {allowed}" if (allowed := _allowed_text(name)) else message
            elif item["type"] == "literal_error":
                message = f"expected {item['ctx']['expected']}".replace("'", "")
            elif item["type"] == "string_pattern_mismatch":  # of output.name alone
                message = "expected up to 100 of a-z, A-Z, 0-9, . _ and -, the first a letter or a digit"
                message += f", as in {var(RUN='run-2')}"
            if dotted not in typed and not isinstance(item["input"], dict | BaseModel):
                message += f" (found {json.dumps(item['input'], default=str):.200})"
            lines[dotted] = message
    return lines


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> ResolvedConfig:
    """Reads a YAML config with its includes, applies `section.key=value` overrides, and validates it.

    Raises:
        ConfigError: the config is invalid; lists every problem with its dotted name.
        CheckpointError: it is that of a run, and there is no such run.
    """
    path = Path(path)
    tree, origins = _load_tree(path)
    stay_in_folder(tree, path)
    typed: dict[str, str] = {}
    for number, override in enumerate(overrides, start=1):
        _refuse_secret(override, f"override {number}")
        name = apply_override(tree, override)
        origins[_setting(name)] = "override"
        if variable := variable_of(name):
            typed[name] = var(**{variable: f"{override.partition('=')[2]:.200}"})
    if isinstance(tree.get("output"), dict) or "output" not in tree:
        tree.setdefault("output", {}).setdefault("name", path.stem)
        origins.setdefault("output.name", "default")
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        problems = _problems(error, typed)
        lines = [f"{typed.get(name, name)}: {text}" for name, text in problems.items()]
        if len(problems) == 1 and problems.keys() <= typed.keys():
            raise ConfigError(lines[0]) from None
        head = f"{path}: {counted(len(problems), 'problem')} in the config"
        where = f"\n{settings_page()} lists all settings"
        raise ConfigError("\n  ".join([head, *lines]) + where) from None
    for name in _leaves(config.model_dump()):
        origins.setdefault(name, "default")
    return ResolvedConfig(config, origins, path, tuple(overrides))


def dump_resolved(resolved: ResolvedConfig) -> str:
    """The whole config as YAML, with the origin of each value in a comment; loads as the same config."""
    lines: list[str] = []

    def write(tree: dict, above: tuple) -> None:
        for key, value in tree.items():
            path, indent = (*above, key), "  " * len(above)
            if isinstance(value, dict) and _section_at(path):
                lines.append(f"{indent}{key}:")
                write(value, path)
            else:
                origin = resolved.origins.get(_dotted(path), "default")
                lines.append(f"{indent}{key}: {json.dumps(value)}  # {origin}")

    write(resolved.config.model_dump(), ())
    return "\n".join(lines) + "\n"


def json_schema() -> dict:
    """The JSON schema of config files; the first line of each shipped YAML points editors to it."""
    schema = RunConfig.model_json_schema()
    schema["properties"]["include"] = {
        "description": "File or files, relative to this one, whose settings this file overrides.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    schema["required"] = []  # required keys may be in an included file
    return schema
