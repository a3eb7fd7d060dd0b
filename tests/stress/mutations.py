"""Broken files for `make fuzz`: configs, rows, templates and model configs, each from a seed of its own."""

import copy
import json
import random
from typing import Any, NamedTuple

import yaml

from sft_play.config.schema import RunConfig
from sft_play.data.template import SHIPPED

SUFFIXES = (".jsonl", ".json", ".csv")
FEW = (0, 0, 0, 1, 1, 2)  # how many changes an input has, so that some inputs are refused late or not at all
UNDAMAGED = 0.7  # of the files; the bytes of the others are damaged

NASTY: list[Any] = [
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**30, 1e-30, 1e30, float("inf"), float("nan"), "", " ",
    "auto", "nope", "no", "1e-4", "3", "../../x", "/proc/self/mem", "-rf", "$(touch x)", "a\nb", "\x00", "é",
    "\ud800", "x" * 5000, "{{ 7 * 7 }}", "(", [], {}, [[]], ["a"], [1, None], {"a": 1}, {"": {}},
]  # fmt: skip

RUN = {
    "model": {"name": "builtin:tiny"},
    "data": {"train_path": "rows.jsonl"},
    "tuning": {"mode": "lora", "lora": {"r": 8}},
    "train": {"max_steps": 8, "learning_rate": 1e-4},
    "output": {"name": "run"},
}

ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]},
    {"conversations": [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2"}]},
    {"instruction": "w1", "input": "w2", "output": "w3", "history": [["w4", "w5"]]},
    {"prompt": "w1", "completion": "w2"},
    {"question": "w1", "answer": "w2"},
    {"system": "w0", "user": "w1", "assistant": "w2"},
    {"text": "w1 w2 w3"},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "w1"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a": [1]}'}}],
            },
            {"role": "tool", "content": "w2", "tool_call_id": "1"},
            {"role": "assistant", "content": "w3", "reasoning_content": "w4"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    },
]

PIECES = r"""
{% for m in messages %}
{% endfor %}
{% if add_generation_prompt %}
{% else %}
{% endif %}
{% if m.role == 'user' %}
{{ m.role }}
{{ m.content }}
{{ messages[0]['content'] }}
{{ eos_token }}
{{ messages|tojson }}
{{ raise_exception('no') }}
{% set x = [] %}
{{ x.append(1) }}
{{ 1 / 0 }}
{% set ns = namespace(n=0) %}
{% set ns.n = ns.n + 1 %}
{{ none.x }}
{{ messages.__class__ }}
{% generation %}
{% endgeneration %}
{% macro f(a) %}
{% endmacro %}
{{ f(f) }}
{{ f(1) }}
{% for i in range(99999) %}
{% for i in range(10**12) %}
{{ 'a' * 3000000000 }}
{{ 'a' * 9999 }}
{{ 9**9**7 }}
{% set x = 9**9 %}{{ x**x }}
{{ messages|map(attribute='content')|join }}
{{ '%0999999999d' % 1 }}
{#
#}
{% include 'x' %}
{% import 'x' as y %}
{% extends 'x' %}
{{ strftime_now('%Y\0') }}
{% break %}
{% raw %}
{% endraw %}
{{ tools }}
{{ m }}
{{ 'x'|indent(99999999) }}
{{ m.content|int ** 99 }}
{% if messages|length > 1 %}
{{ self }}
{{ lipsum(n=99999) }}
{{ cycler('a').next() }}
<|end|>
""".splitlines()  # the first one is empty

JUNK = [b"\x00", b"\xff", b"\t", b"\n", b"[" * 300, b"{" * 5, b"? ", b"- ", b": ", b'"', b"&a "]

ARCHITECTURE: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
}
MODEL_TYPES = ["llama", "qwen2", "qwen3", "gemma2", "mistral", "gpt2", "phi3", "mixtral", "mamba", "t5", "x"]


class Case(NamedTuple):
    """One broken input."""

    kind: str
    content: bytes
    suffix: str = ""
    """Of the file that it is written to."""
    overrides: tuple[str, ...] = ()
    """`section.key=value`, for a config."""
    words: tuple[str, ...] = ()
    """Of a command, as typed."""
    console: str = ""
    """What its standard streams are."""
    environment: tuple[tuple[str, str], ...] = ()


def _leaf_names() -> list[str]:
    names = []
    for section, field in RunConfig.model_fields.items():
        annotation: Any = field.annotation
        names += [f"{section}.{key}" for key in annotation.model_fields]
    return names


def config(rng: random.Random) -> Case:
    """A broken config, and overrides of it."""
    tree = copy.deepcopy(RUN)
    for _ in range(rng.choice(FEW)):
        section, _, key = rng.choice(_leaf_names()).partition(".")
        tree.setdefault(section, {})[key] = rng.choice(NASTY)
    for _ in range(rng.choice(FEW)):
        _mutate_tree(rng, tree)
    overrides = [f"{rng.choice(_leaf_names())}={rng.choice(NASTY)}" for _ in range(rng.choice(FEW))]
    text = yaml.safe_dump(tree, allow_unicode=True, default_flow_style=rng.random() < 0.3)
    if rng.random() < 0.1:
        text = f"include: {rng.choice(NASTY)}\n{text}"
    return Case("config", _maybe_damaged(rng, text), ".yaml", tuple(overrides))


def rows(rng: random.Random, suffix: str | None = None, *, damaged: bool = True) -> Case:
    """A broken file of rows; not `damaged`: at most its values are wrong, not its bytes."""
    suffix = suffix or rng.choice(SUFFIXES)
    base = rng.choice(ROWS)
    made: list[Any] = [copy.deepcopy(base) for _ in range(rng.randint(1, 4))]
    for _ in range(rng.choice(FEW)):
        _mutate_tree(rng, rng.choice(made))
    if rng.random() < 0.1:
        made[-1] = rng.choice(NASTY)
    if rng.random() < 0.1:
        depth = rng.choice([90, 110, 900, 1500, 100_000])
        made.append(f'{{"messages": {"[" * depth}{"]" * depth}}}')
    lines = [row if isinstance(row, str) else json.dumps(row) for row in made]
    if suffix == ".json" and rng.random() < 0.7:
        text = f"[{', '.join(lines)}]" if rng.random() < 0.7 else f'{{"data": [{", ".join(lines)}]}}'
    elif suffix == ".csv":
        cells = [json.dumps(value) if isinstance(value, list) else str(value) for value in base.values()]
        text = f"{','.join(base)}\n" + ",".join('"' + cell.replace('"', '""') + '"' for cell in cells) + "\n"
    else:
        text = "\n".join(lines)
    content = _maybe_damaged(rng, text) if damaged else text.encode("utf-8", "surrogatepass")
    return Case("rows", content, suffix)


def template(rng: random.Random) -> Case:
    """A broken chat template."""
    if rng.random() < 0.3:
        text = rng.choice(sorted(SHIPPED.glob("*.jinja"))).read_text(encoding="utf-8")
        place = rng.randrange(len(text))
        text = text[:place] + rng.choice(PIECES) + text[place:]
    else:
        text = "".join(rng.choices(PIECES, k=rng.randint(1, 12)))
    if rng.random() < 0.1:
        text = rng.choice(
            ["{{ " + "(" * 500 + "1" + ")" * 500 + " }}", "{% if 1 %}" * 200 + "{% endif %}" * 200]
        )
    return Case("template", _maybe_damaged(rng, text), ".jinja")


def model(rng: random.Random) -> Case:
    """A broken config.json of a model."""
    tree = copy.deepcopy(ARCHITECTURE)
    tree["model_type"] = rng.choice(["llama", *MODEL_TYPES])
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.6:
            tree[rng.choice(sorted(tree))] = rng.choice([*NASTY, 10**7, 63, "64"])
        else:
            _mutate_tree(rng, tree)
    return Case("model", _maybe_damaged(rng, json.dumps(tree)), ".json")


def _mutate_tree(rng: random.Random, tree: Any) -> None:
    """Replaces, removes, renames or nests one node of a tree of dicts and lists, in place."""
    node = tree
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(node[key], (dict, list)) and node[key] and rng.random() < 0.7:
            node = node[key]
            continue
        break
    action = rng.choice(["replace", "replace", "replace", "remove", "rename", "nest", "repeat"])
    if action == "replace":
        node[key] = copy.deepcopy(rng.choice(NASTY))
    elif action == "remove":
        del node[key]
    elif action == "nest":
        node[key] = [node[key]]
    elif action == "rename" and isinstance(node, dict):
        node[f"{key}x"] = node.pop(key)
    elif action == "repeat" and isinstance(node, list):
        node.extend(copy.deepcopy(node[key]) for _ in range(rng.choice([1, 50])))


def _maybe_damaged(rng: random.Random, text: str) -> bytes:
    content = text.encode("utf-8", "surrogatepass")
    if rng.random() < UNDAMAGED:
        return content
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(content) + 1)
        damage = rng.choice(["cut", "flip", "insert", "repeat", "remove", "utf16", "bom", "crlf"])
        if damage == "cut":
            content = content[:place]
        elif damage == "flip" and place < len(content):
            content = content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]
        elif damage == "insert":
            content = content[:place] + rng.choice(JUNK) + content[place:]
        elif damage == "repeat":
            content = content[:place] + content[place : place + 40] * 3 + content[place:]
        elif damage == "remove":
            content = content[:place] + content[place + rng.randint(1, 20) :]
        elif damage == "utf16":
            content = content.decode("utf-8", "replace").encode("utf-16")
        elif damage == "bom":
            content = b"\xef\xbb\xbf" + content
        elif damage == "crlf":
            content = content.replace(b"\n", b"\r\n")
    return content
