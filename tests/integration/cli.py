"""The command line under test: inside this process, where that is enough, or as a real one."""

import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from sft_play import cli
from sft_play.runlog import RunDir, read_metrics
from sft_play.ui.console import set_console
from tests.conftest import REPOSITORY

# Libraries keep the stream that they find at their first import: these stay open, and write where the
# descriptors lead.
STREAMS = [open(number, "w", closefd=False, buffering=1) for number in (1, 2)]

TRAINED = 37  # rows: no batch of the tests divides them, and two processes do not either

SETTINGS = """\
model:
  name: {model}
data:
  train_path: {folder}/train.jsonl
  val_path: {folder}/val.jsonl
  test_path: {folder}/val.jsonl
tuning:
  mode: lora
train:
  max_steps: 8
  effective_batch_size: 8
  batch_size: 4
  learning_rate: 1e-2
  logging_steps: 1
eval:
  limit: 4
  max_new_tokens: 6
output:
  name: one
  dir: {folder}/runs
"""


class Done(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one object on standard output; fails when anything else is there."""
        return json.loads(self.out)


@contextlib.contextmanager
def _streams_to(files: list[Any]) -> Iterator[None]:
    saved = [os.dup(number) for number in (1, 2)]
    for number, file in zip((1, 2), files, strict=True):
        os.dup2(file.fileno(), number)
    try:
        with contextlib.redirect_stdout(STREAMS[0]), contextlib.redirect_stderr(STREAMS[1]):
            yield
    finally:
        for stream in STREAMS:
            stream.flush()
        for number, original in zip((1, 2), saved, strict=True):
            os.dup2(original, number)
            os.close(original)


def sft(*words: str | Path, function: Any = cli.main) -> Done:
    """Runs a command in this process."""
    set_console(None)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with _streams_to([out, err]):
            try:
                code = function([str(word) for word in words])
            except SystemExit as error:  # from reading the arguments
                code = error.code
        out.seek(0), err.seek(0)
        return Done(code, out.read(), err.read())


def environment(**extra: str) -> dict[str, str]:
    """For a process of its own: one thread, as a test of exact numbers wants it."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), **extra}


def start(*words: str | Path, **extra: str) -> subprocess.Popen:
    """Starts `python -m sft_play` or, if the first word is a path, that script."""
    program = [str(words[0])] if isinstance(words[0], Path) else ["-m", "sft_play", words[0]]
    command = [sys.executable, *program, *map(str, words[1:])]
    return subprocess.Popen(
        command, env=environment(**extra), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finish(process: subprocess.Popen, timeout_s: float = 120) -> Done:
    """Waits for a started process."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    return Done(process.returncode, out, err)


def write_rows(path: Path, rows: list[Any]) -> Path:
    """A JSONL file."""
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def conversation(rng: random.Random) -> dict:
    """A question of a few words and its answer, which is the question's words plus one."""
    words = [rng.randrange(100) for _ in range(rng.randint(2, 8))]
    question = " ".join(f"w{word}" for word in words)
    answer = " ".join(f"w{word + 100}" for word in words)
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def make_workspace(folder: Path, model: Path) -> Path:
    """Data in two formats and a config that trains for 8 steps; returns the config file."""
    folder.mkdir(exist_ok=True)
    rng = random.Random(0)
    write_rows(folder / "train.jsonl", [conversation(rng) for _ in range(TRAINED)])
    pairs = [[turn["content"] for turn in conversation(rng)["messages"]] for _ in range(7)]
    write_rows(folder / "val.jsonl", [{"question": question, "answer": answer} for question, answer in pairs])
    config = folder / "run.yaml"
    config.write_text(SETTINGS.format(folder=folder, model=model))
    return config


def untidy(text: str, width: int = 80) -> list[str]:
    """Lines that are longer than the screen though they have a blank to break at, or that have escape codes."""
    lines = text.splitlines()
    return [line for line in lines if "\x1b" in line or (len(line) > width and len(line.split()) > 1)]


def snapshot(folder: Path) -> dict[str, str]:
    """Every file of a run and a digest of it, but for lock and logs, which a new attempt writes to."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and not path.name.startswith((".", "log", "launcher.log"))
        and path.parent.name != "ranks"
    }


def signal_at_step(run: RunDir, step: int, pid: int, number: int, timeout_s: float = 90) -> None:
    """Waits for the metrics of a step and sends a signal to who is training."""
    deadline = time.monotonic() + timeout_s
    while max((line["step"] for line in read_metrics(run)), default=0) < step and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(pid, number)


def gone(pids: list[int], within_s: float = 5.0) -> bool:
    """Whether these processes have ended."""
    deadline = time.monotonic() + within_s
    while any(
        psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids
    ):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
