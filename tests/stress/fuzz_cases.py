"""The cases of `make fuzz`: broken files (mutations.py), and what people type, set, plug in and close."""

import json
import random
import string
from collections.abc import Callable
from typing import Any

from tests.stress import mutations
from tests.stress.mutations import NASTY, ROWS, Case


def split(line: str) -> list[str]:
    """The words of a line."""
    return line.split()


# A case of the last kind takes seconds, so only a random share of all cases is of it.
PROCESS, PROCESS_SHARE = "process", 1 / 250
KINDS = (*split("config rows template model yes-no pattern source tokens console"), PROCESS)

# Setting of make -> the targets that know it, with what they need, and the word of the recipe that it adds.
SWITCHES = {
    "PUBLIC": ([("push", {"REPO": "user/name"})], "--public"),
    "FORCE": (
        [("dapt-docx", {"IN": "a", "OUT": "b"}), ("infer-batch", {"IN": "a"}), ("compare", {"RUNS": "a b"})],
        "--force",
    ),
    "CONFIRM": ([("clean-all", {})], "rm"),
    "CHAT": ([("eval-lm", {"TASKS": "a"})], "--chat"),
    "AUTO": ([("setup-accelerate", {})], "--auto"),
}
ANSWERS = (
    *split(
        "0 1 yes no true false 1 yes true 0 no false YES True on off y n 2 -1 01 1.0 null none yess ja # % é"
    ),
    *split("$(1) ${HOME} `id` 1;0 '1' \"1\" \\1"),
    *("", " ", " 1 ", "1 1", "0 1", "no yes", "$(shell id)", "1\n", "1" * 5000),
)

SOUND = split("q_proj v_proj layers.0.self_attn.q_proj .*mlp.* self_attn.[qk]_proj up_proj|down_proj")
PIECES = (
    *split(
        r"q_proj v_proj layers lm_head embed_tokens mlp self_attn model 0 . \. \d+ .* .+ [ ] ( ) ^ $ | * + ?"
    ),
    *split(r"(a+)+ (.*)* (.+.+)+x (a|aa)+$ (?i) (?P<n> (?=x) (?R) {1,9999} {2} {1,99999999999} \1 \p{L}"),
    *("\x00", " ", "", "é", "\\", "x" * 300),
)
HALF = "\ud800"  # of a character
MODULES = (*split("q_proj k_proj down_proj lm_head embed_tokens norm layers.0.mlp.up_proj nope"), "")
TOKENS = (
    *split("<tool> <tool> </tool> <think> ~~x~~ \ue000 a ab <|end|> 日本"),
    " <x>",
    "<x> ",
    "{{ x }}",
    "\n",
)

FILES = (*split(".jsonl .jsonl .json .csv .txt .md folder link bytes"), "empty folder", "")
TEXTS = (
    "w1 w2 w3. " * 40,
    "# w1\n\nw2\n" * 9,
    "a\r\nb\r\n",
    "\ufeffw1",
    "é" * 99,
    "w1",
    "",
    " ",
    "\n\n",
    "\x00",
)

COMMANDS = [
    tuple(line.split())
    for line in """
        config-schema
        gpu-info
        gpu-info --json
        memory-check
        check --config run.yaml
        check --config run.yaml --json
        check --config none.yaml
        report --runs runs
        report --runs nowhere
        compare --runs runs one one
        --help
        nonsense
        train
        plan --gpus x
        dapt-docx --input documents --output text.jsonl
    """.splitlines()
]  # without a word, too
CONSOLES = ("file", "closed pipe", "cut pipe", "slow pipe", "full", "nothing", "no input")

RUNS = (*["train"] * 3, "prepare", "plan", "infer", "check", "config-schema")
# Variables that change nothing, and those that are refused with 2.
HARMLESS = {
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_DYNAMO_BACKEND": "inductor",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3",
    "ACCELERATE_USE_FSDP": "true",
    "COLUMNS": "1",
    "CONFIRM": "1",
    "FORCE": "1",
    "FSDP_VERSION": "2",
    "LOCAL_RANK": "1",
    "NO_COLOR": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "ONEDNN_DEFAULT_FPMATH_MODE": "BF16",
    "PET_MAX_RESTARTS": "3",
    "PMI_SIZE": "x",
    "PUBLIC": "1",
    "PYTHONUTF8": "0",
    "RANK": "abc",
    "TERM": "nope",
}
REFUSED = {"TORCH_LOGS": "nonsense", "PYTHONOPTIMIZE": "2", "WORLD_SIZE": "2"}


def make_case(seed: int, number: int, kinds: tuple[str, ...] = KINDS) -> Case:
    """The case with this number; the same for the same seed."""
    rng = random.Random(f"{seed}/{number}")
    makers: dict[str, Callable[[random.Random], Case]] = {
        "config": mutations.config,
        "rows": mutations.rows,
        "template": mutations.template,
        "model": mutations.model,
        "yes-no": _yes_no,
        "pattern": _pattern,
        "source": _source,
        "tokens": _tokens,
        "console": _console,
        PROCESS: _process,
    }
    usual = [kind for kind in kinds if kind != PROCESS]
    if not usual or (PROCESS in kinds and rng.random() < PROCESS_SHARE):
        return _process(rng)
    return makers[usual[number % len(usual)]](rng)


def _case(kind: str, tree: Any, **fields: Any) -> Case:
    return Case(kind, json.dumps(tree).encode(), ".json", **fields)


def _yes_no(rng: random.Random) -> Case:
    name = rng.choice(sorted(SWITCHES))
    target, needed = rng.choice(SWITCHES[name][0])
    value = rng.choice(ANSWERS)
    if rng.random() < 0.2:
        value += rng.choice(string.punctuation + string.ascii_letters + string.digits + " ")
    given = {"setting": name, "value": value, "typed": rng.random() < 0.6}
    return _case("yes-no", given, words=(target, *(f"{key}={text}" for key, text in needed.items())))


def _expression(rng: random.Random) -> str:
    if rng.random() < 0.4:
        return rng.choice(SOUND)
    text = "".join(rng.choices(PIECES, k=rng.choice([1, 1, 2, 3, 5])))
    return text + HALF if rng.random() < 0.02 else text


def _pattern(rng: random.Random) -> Case:
    lora: dict[str, Any] = {"r": rng.choice([1, 2, 4])}
    if rng.random() < 0.5:
        lora["target_modules"] = rng.choices([*MODULES, _expression(rng)], k=rng.choice([1, 1, 2, 3]))
    for name in ("rank_pattern", "alpha_pattern"):
        if rng.random() < 0.4:
            lora[name] = {
                _expression(rng): rng.choice([1, 2, 3, 3, 4, 4, 0, "x"]) for _ in range(rng.choice([1, 1, 2]))
            }
    if rng.random() < 0.2:
        lora["modules_to_save"] = rng.choices(MODULES, k=rng.choice([1, 2]))
    tree: dict[str, Any] = {"tuning": {"lora": lora}}
    if rng.random() < 0.4:
        tree["eval"] = {"answer_pattern": _expression(rng)}
    return _case("pattern", tree)


def _file(rng: random.Random, name: str) -> dict[str, Any]:
    kind = rng.choice(FILES)
    suffix = kind if kind.startswith(".") else rng.choice([".jsonl", ".txt", ""])
    found: dict[str, Any] = {"name": f"{name}{suffix}", "kind": kind}
    if kind == "folder":
        found["files"] = [_file(rng, f"{name}{number}") for number in range(rng.choice([0, 1, 2]))]
    elif kind in (".txt", ".md", ""):
        found["text"] = rng.choice(TEXTS)
    elif kind in (".jsonl", ".json", ".csv"):
        made = mutations.rows(rng, suffix=kind, damaged=rng.random() < 0.2)
        found["bytes"] = made.content.hex()
    elif kind == "bytes":
        found["bytes"] = rng.randbytes(rng.choice([0, 9, 999])).hex()
    return found


def _source(rng: random.Random) -> Case:
    files = [_file(rng, name) for name in "abc"[: rng.choice([1, 1, 2, 3])]]
    for file in files:
        if file["kind"] in (".jsonl", "bytes") and rng.random() < 0.6:  # most of the data is sound
            lines = [json.dumps(rng.choice(ROWS[:-1])) for _ in range(rng.randint(1, 12))]
            same = rng.random() < 0.8
            text = "\n".join([lines[0]] * len(lines) if same else lines)
            file |= {"name": f"{file['name'].partition('.')[0]}.jsonl", "kind": ".jsonl"}
            file["bytes"] = text.encode().hex()
    names = [file["name"] for file in files]
    data: dict[str, Any] = {"val_fraction": rng.choice([0, 0, 0.1, 0.9])}
    if rng.random() < 0.5:
        data["train_path"] = rng.choice([*names * 6, "nowhere.jsonl", ".", ""])
    else:
        data["sources"] = [_one_source(rng, name) for name in names]
    choices: dict[str, list[Any]] = {
        "task": ["sft", "cpt", "cpt", "cpt", "mixed", "mixed", "nope"],
        "format": ["auto", "text", "messages", "alpaca", "nope"],
        "overlong": ["drop", "truncate", "error"],
        "supervise": ["assistant", "last", "all"],
        "dedup": [True, False],
        "limit": [1, 2, 0, 10**9],
        "system_prompt": ["w0", "", "\x00"],
        "val_path": [*names, "nowhere"],
        "num_workers": [1, 2],
    }
    for name in rng.sample(sorted(choices), k=rng.choice([0, 1, 1, 2, 3])):
        data[name] = rng.choice(choices[name])
    tree: dict[str, Any] = {"data": data, "model": {"name": "byte"}}
    if rng.random() < 0.5:
        tree["model"]["max_seq_len"] = rng.choice([1, 2, 16, 64, 256, 256, 4096, 10_000_000, "auto"])
    return _case("source", {"files": files, "config": tree})


def _one_source(rng: random.Random, name: str) -> dict[str, Any]:
    source: dict[str, Any] = {"path": name}
    if rng.random() < 0.5:
        source["weight"] = rng.choice([0, 0.5, 0.5, 1, 2, 2, 1000, 0.001, -1, float("inf")])
    if rng.random() < 0.2:
        source["format"] = rng.choice(["text", "messages", None])
    if rng.random() < 0.03:
        source["split"] = rng.choice(["train", "nope"])
    return source


def _tokens(rng: random.Random) -> Case:
    plain = [text for text in NASTY if isinstance(text, str) and (text != HALF or rng.random() < 0.1)]
    tokens: Any = rng.choices([*TOKENS * 3, *plain], k=rng.choice([0, 1, 1, 2, 3]))
    if rng.random() < 0.1:
        tokens = rng.choice(NASTY)
    lora: dict[str, Any] = {"r": 2}
    if rng.random() < 0.4:
        lora["target_modules"] = rng.choices(MODULES, k=rng.choice([1, 2]))
    if rng.random() < 0.2:
        lora["modules_to_save"] = rng.choices(MODULES, k=1)
    return _case("tokens", {"model": {"name": "byte", "new_tokens": tokens}, "tuning": {"lora": lora}})


def _console(rng: random.Random) -> Case:
    words = rng.choice(COMMANDS)
    if words and words[0] == "check" and rng.random() < 0.3:
        words = (*words, f"train.learning_rate={rng.choice(NASTY)}".replace("\x00", "").replace("\ud800", ""))
    return _case("console", rng.randrange(3000), words=words, console=rng.choice(CONSOLES[1:]))


def _process(rng: random.Random) -> Case:
    environment = {name: HARMLESS[name] for name in rng.sample(sorted(HARMLESS), k=rng.choice([0, 1, 2, 4]))}
    if rng.random() < 0.2:
        name = rng.choice(sorted(REFUSED))
        environment[name] = REFUSED[name]
    command, console = rng.choice(RUNS), rng.choice(CONSOLES)
    words = (command,) if command == "config-schema" else (command, "--config", "run.yaml")
    given = tuple(sorted(environment.items()))
    return _case(PROCESS, rng.randrange(3000), words=words, console=console, environment=given)
