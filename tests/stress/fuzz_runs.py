"""How the cases of `make fuzz` are run that are not a broken file: each returns what became of it in a word.

A case that ends otherwise than promised raises Wrong, one that is refused an SftPlayError.
"""

import contextlib
import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.markdown import ROOT
from sft_play import cli
from sft_play.commands.answers import Compared, require_answers, score_answer
from sft_play.config.load import load_config
from sft_play.config.schema import RunConfig
from sft_play.data.chat import Chat
from sft_play.data.prepare import prepare
from sft_play.machine.gpus import Machine
from sft_play.ui.console import set_console
from tests.stress.fuzz_cases import REFUSED, SWITCHES
from tests.stress.mutations import ROWS, Case

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
YES, NO = {"1", "yes", "true"}, {"0", "no", "false"}  # written down again: they are what is promised
NOT_INHERITED = {"PUBLIC", "FORCE", "CONFIRM"}
PRINT = {"config-schema", "gpu-info", "memory-check", "check"}  # nothing else is made by them
CHILD_SECONDS, PROCESS_SECONDS = 240, 500
REFERENCES = ["The answer is 42.", "#### 7", "a" * 60 + "!"]
RUN = """\
model: {name: model}
data: {train_path: rows.jsonl, val_fraction: 0}
train: {max_steps: 2, effective_batch_size: 4, batch_size: 2, logging_steps: 1, mixed_precision: "no"}
eval: {generate: false}
output: {name: one}
"""


class Wrong(Exception):
    """A case ended otherwise than it should."""


@dataclass(frozen=True)
class Setting:
    """What all cases of a worker share."""

    folder: Path
    chat: Chat
    machine: Machine
    first_losses: list[float] = field(default_factory=list)
    """Of a run in an environment of nothing, once one was needed."""


# --- what is typed


def run_yes_no(case: Case, setting: Setting) -> str:
    """A setting of make that is yes or no: what the recipe does with it."""
    del setting
    given = json.loads(case.content)
    name, value = given["setting"], given["value"]
    words, environment = list(case.words), {}
    if given["typed"]:
        words.append(f"{name}={value}")
    else:
        environment[name] = value
    recipe = _recipe(words, environment)
    parts = value.split()
    inherited = not given["typed"] and name in NOT_INHERITED
    if inherited or not parts or (len(parts) == 1 and parts[0] in NO):
        wanted = "no"
    elif len(parts) == 1 and parts[0] in YES:
        wanted = "yes"
    else:
        wanted = "refused"
    found = "refused" if recipe is None else "yes" if SWITCHES[name][1] in recipe else "no"
    if name == "CONFIRM" and found == "refused" and wanted == "no":
        wanted = "refused"  # nothing is removed without it
    if found != wanted and not ("\n" in value and found == "refused"):
        raise Wrong(f"{name}={value!r} is taken as {found}, not {wanted}")
    return found


def _recipe(words: list[str], environment: Mapping[str, str]) -> list[str] | None:
    """The words of what make would do; None if it refuses."""
    command = ["make", "--dry-run", "--directory", str(ROOT), *words]
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(command, env={**kept, **environment}, capture_output=True, text=True, check=False)
    return None if done.returncode else done.stdout.split()


# --- settings of a config, through the code of a run


def _configured(tree: Mapping[str, Any], folder: Path) -> RunConfig:
    rest = {name: value for name, value in tree.items() if name not in ("model", "data")}
    whole = {
        "model": tree.get("model", {"name": "byte"}),
        "data": tree.get("data", {"train_path": "rows.jsonl"}),
    }
    file = folder / "typed.yaml"
    file.write_text(json.dumps(whole | rest))
    return load_config(file).config


def _small_model(rows: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: Any = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(vocab_size=rows, pad_token_id=None, **sizes))


def run_pattern(case: Case, setting: Setting) -> str:
    """Patterns and names of modules, as far as an adapter; and a pattern for answers."""
    from sft_play.model.adapters.attach import attach_adapter

    config = _configured(json.loads(case.content), setting.folder)
    lora, pattern = config.tuning.lora, config.eval.answer_pattern
    model = attach_adapter(_small_model(len(setting.chat.tokenizer)), lora)
    adapted = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
    for target in () if lora.target_modules == "auto" else lora.target_modules:
        if not any(f".{name}".endswith(f".{target}") for name in adapted):
            raise Wrong(f"{target!r} of target_modules has no adapter")
    if pattern is not None:
        require_answers(REFERENCES, pattern)
        for reference, answer in zip(REFERENCES, ["42", "", "a" * 500], strict=True):
            score_answer(Compared(answer, reference), config.eval)
    return "adapter"


def run_tokens(case: Case, setting: Setting) -> str:
    """New tokens: in the tokenizer, in a text, in a model, and beside an adapter."""
    from sft_play.model.adapters.attach import attach_adapter
    from sft_play.model.new_tokens import add_new_tokens, add_rows

    config = _configured(json.loads(case.content), setting.folder)
    tokenizer = copy.deepcopy(setting.chat.tokenizer)
    model = _small_model(len(tokenizer))
    tokens = add_new_tokens(tokenizer, config.model.new_tokens)
    for token in tokens:
        ids = tokenizer(f"w1{token.text}w2", add_special_tokens=False)["input_ids"]
        if ids.count(token.id) != 1 or tokenizer.decode([token.id]) != token.text:
            raise Wrong(f"{token.text!r} is not one token of a text: {ids}")
    if tokens:
        add_rows(model, tokens)
    attach_adapter(model, config.tuning.lora, new_ids=[token.id for token in tokens])
    return "tokens" if tokens else "no tokens"


def run_source(case: Case, setting: Setting) -> str:
    """Sources and tasks, as far as tokenized rows."""
    tree = json.loads(case.content)
    folder = setting.folder / "sources"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for file in tree["files"]:
        _write(folder, file)
    setting.chat.tokenizer.chat_template = CHATML
    with contextlib.chdir(folder):
        config = _configured(tree["config"], setting.folder)
        data = prepare(config, setting.chat.tokenizer, model_limit=4096, progress=False)
    for split in ("train", "val", "test"):
        counts = data.stats[split]
        if counts and not counts["supervised_tokens"]:
            raise Wrong(f"{split} has {counts['rows']} rows and no supervised token")
    return f"{config.data.task} rows"


def _write(folder: Path, file: dict[str, Any]) -> None:
    path = folder / file["name"]
    if file["kind"] in ("folder", "empty folder"):
        path.mkdir()
        for inner in file.get("files", ()):
            _write(path, inner)
    elif file["kind"] == "link":
        path.symlink_to("nowhere")
    elif "bytes" in file:
        path.write_bytes(bytes.fromhex(file["bytes"]))
    else:
        path.write_text(file["text"], encoding="utf-8")


# --- consoles


@contextlib.contextmanager
def streams(console: str, read_bytes: int) -> Iterator[dict[str, Any]]:
    """Standard streams as arguments of Popen, of which a reader takes so many bytes before it goes."""
    reading, writing = os.pipe()
    if console in ("file", "no input", "full", "nothing"):
        target = "/dev/full" if console == "full" else os.devnull
        with open(target, "w") as out:  # noqa: PTH123
            yield {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
        os.close(reading)
        os.close(writing)
        return
    if console == "slow pipe":
        os.set_blocking(writing, False)

    def read() -> None:
        left = read_bytes if console == "cut pipe" else 0 if console == "closed pipe" else 1 << 30
        while left > 0 and (got := os.read(reading, min(left, 4096))):
            left -= len(got)
        os.close(reading)

    reader = threading.Thread(target=read)
    reader.start()
    if console == "closed pipe":
        reader.join()
    try:
        yield {"stdin": subprocess.DEVNULL, "stdout": writing, "stderr": writing}
    finally:
        os.close(writing)
        reader.join()


def run_console(case: Case, setting: Setting) -> str:
    """A command that needs no PyTorch, in a copy of this process whose streams are broken."""
    _write_run(setting.folder)
    plain, _ = _forked(case.words, "file", 0)
    code, trace = _forked(case.words, case.console, json.loads(case.content))
    wanted = 6 if case.console == "full" and PRINT.intersection(case.words[:1]) else plain
    if code != wanted or code in (1, None):
        raise Wrong(f"exit code {code}, but {wanted} with a console\n{trace}")
    return f"exit {code}"


def _forked(words: tuple[str, ...], console: str, read_bytes: int) -> tuple[int | None, str]:
    """Exit code of a command (None: a signal ended it), and the traceback of what it raised."""
    told, tells = os.pipe()
    with streams(console, read_bytes) as given:
        child = os.fork()
        if not child:
            _become(words, console, given, tells)
        os.close(tells)
        _, status = os.waitpid(child, 0)
    with os.fdopen(told, "rb") as report:
        trace = report.read().decode()
    return (os.WEXITSTATUS(status) if os.WIFEXITED(status) else None), trace


def _become(words: tuple[str, ...], console: str, given: dict[str, Any], tells: int) -> None:
    """Runs a command in the process that was forked for it, and ends that."""
    code: Any = 1
    try:
        signal.alarm(CHILD_SECONDS)
        for number, stream in ((1, given["stdout"]), (2, given["stderr"])):
            os.dup2(stream if isinstance(stream, int) else stream.fileno(), number)
        for number in (0, 1, 2) if console == "nothing" else (0,) if console == "no input" else ():
            os.close(number)
        sys.stdin, sys.stdout, sys.stderr = None, sys.__stdout__, sys.__stderr__  # type: ignore[assignment]
        set_console(None)
        code = cli.main(list(words))
    except SystemExit as error:
        code = error.code
    except BaseException:  # noqa: BLE001 - this is what is looked for
        os.write(tells, traceback.format_exc().encode())
    finally:
        os._exit(code if isinstance(code, int) else 1)


def _write_run(folder: Path) -> None:
    """A config, documents, and the directory of a run that is read but not trained."""
    (folder / "run.yaml").write_text(RUN)
    (folder / "rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    (folder / "documents").mkdir(exist_ok=True)
    (folder / "documents" / "one.txt").write_text("w1 w2\n")
    run = folder / "runs" / "one"
    if not run.exists():
        run.mkdir(parents=True)
        (run / "summary.json").write_text('{"status": "done", "optimizer_steps": 1}')
        (run / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0}\n')


# --- whole processes


def run_process(case: Case, setting: Setting) -> str:
    """`python -m sft_play` itself, with variables and broken streams; a run must be that of no variables."""
    folder = setting.folder / "process"
    if not folder.exists():
        _write_model(folder, setting.chat.tokenizer)
    if case.words[0] == "train" and not setting.first_losses:
        _started(("train", "--config", "run.yaml"), {}, "file", 0, folder)
        setting.first_losses.extend(_losses(folder))
    environment = dict(case.environment)
    code, text = _started(case.words, environment, case.console, json.loads(case.content), folder)
    unread = case.console == "full" and case.words[0] in PRINT | {"prepare", "plan"}
    allowed = {6} if unread else {0}
    if REFUSED.keys() & environment.keys():  # some are read only after the first line was printed
        allowed = {2} | allowed - {0}
    if case.words[0] in ("check", "infer"):  # this machine, or no adapter, may be found wanting
        allowed |= {2, 8}
    if case.words[0] in ("plan", "config-schema") and "TORCH_LOGS" in environment:  # they may need no PyTorch
        allowed |= {0}
    if environment.keys() & {"WORLD_SIZE"} and case.words[0] != "train":
        allowed |= {0, 6}
    if code not in allowed:
        raise Wrong(f"exit code {code}, not {sorted(allowed)}\n{text[-3000:]}")
    if case.words[0] == "train" and code == 0 and _losses(folder) != setting.first_losses:
        raise Wrong(f"the losses {_losses(folder)} are not those of a plain run, {setting.first_losses}")
    return f"{case.words[0]} {code}"


def _write_model(folder: Path, tokenizer: Any) -> None:
    import torch

    folder.mkdir()
    torch.manual_seed(0)
    _small_model(len(tokenizer)).save_pretrained(folder / "model")
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder / "model")
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({"question": f"w{n}", "answer": f"w{n + 1}"}) + "\n" for n in range(12))
    )
    (folder / "run.yaml").write_text(RUN)


def _losses(folder: Path) -> list[float]:
    lines = (folder / "runs" / "one" / "metrics.jsonl").read_text().splitlines()
    return [record["train/loss"] for record in map(json.loads, lines) if "train/loss" in record]


def _started(
    words: tuple[str, ...], environment: Mapping[str, str], console: str, read_bytes: int, folder: Path
) -> tuple[int, str]:
    """Exit code of a process, and the log of the run, if it has one."""
    command = [sys.executable, "-m", "sft_play", *words]
    if console in ("nothing", "no input"):
        closed = "<&- >&- 2>&-" if console == "nothing" else "<&-"
        command = ["bash", "-c", f'exec "$@" {closed}', "-", *command]
    values = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    with streams(console, read_bytes) as given:
        process = subprocess.Popen(command, cwd=folder, env=values, **given)
        try:
            code = process.wait(PROCESS_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise Wrong(f"{' '.join(words)} takes more than {PROCESS_SECONDS} s") from None
    log = folder / "runs" / "one" / "log.txt"
    return code, log.read_text(errors="replace") if log.exists() else ""


RUNNERS = {
    "yes-no": run_yes_no,
    "pattern": run_pattern,
    "source": run_source,
    "tokens": run_tokens,
    "console": run_console,
    "process": run_process,
}
