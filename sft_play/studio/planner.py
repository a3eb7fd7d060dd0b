"""Plans for the explorer, made by `sft-play plan` in a process of its own, one at a time.

The server itself needs no torch, and a plan says here what it says in a shell.
"""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from sft_play.report.layout import make_command

LONGEST_QUEUE = 4  # plans that are made or wait
KEPT = 64  # answers
LIMIT_S = 1800.0  # of a plan; all common GPUs by each method take ten minutes on two busy cores
FORGOTTEN_S = 30.0  # a plan that waits and that no page has asked for in this time is not made
GENTLE = 10  # niceness: a run on this machine comes first
FORCED_EXIT_S = 5.0


@dataclass(frozen=True)
class Question:
    """What is planned; None: on each common GPU, on the fewest GPUs that fit, by each method."""

    model: str
    gpu: str | None = None
    gpus: int | None = None
    method: str | None = None
    rows: str | None = None  # numbers, as they were typed
    tokens: str | None = None  # of the median row
    context: str | None = None  # tokens of the longest row
    price: str | None = None  # of a GPU hour

    @property
    def arguments(self) -> list[str]:
        """Those of `sft-play`."""
        named = {"--gpu": self.gpu, "--gpus": self.gpus, "--rows": self.rows, "--tokens": self.tokens}
        named |= {"--gpu-hour": self.price}
        flags = [word for name, value in named.items() if value for word in (name, str(value))]
        return ["plan", "--model", self.model, *flags, "--json", *self._settings]

    @property
    def _settings(self) -> list[str]:
        return [f"tuning.mode={self.method}"] * bool(self.method) + self._length

    @property
    def _length(self) -> list[str]:
        return [f"model.max_seq_len={self.context}"] * bool(self.context)

    @property
    def command(self) -> str:
        """What answers the same in a shell."""
        named: dict[str, Any] = {"MODEL": self.model, "GPU": self.gpu, "NGPU": self.gpus, "MODE": self.method}
        named |= {"ROWS": self.rows, "TOKENS": self.tokens, "GPU_HOUR": self.price}
        return make_command("plan", overrides=self._length, **named)


@dataclass(frozen=True)
class Answer:
    """A plan as JSON, or why there is none."""

    tree: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class Waiting:
    """An answer is being worked on, for so many seconds, or so many others come first."""

    ahead: int
    seconds: float


class Busy(Exception):
    """As many plans wait as may."""


def _command(question: Question) -> list[str]:
    return [sys.executable, "-m", "sft_play", *question.arguments]


class Planner:
    """Answers questions one after the other, in the order in which they were asked."""

    def __init__(
        self, command: Callable[[Question], Sequence[str]] = _command, limit_s: float = LIMIT_S
    ) -> None:
        self._command, self._limit_s = command, limit_s
        self._lock = threading.Lock()
        self._answers: dict[Question, Answer] = {}
        self._asked: dict[Question, float] = {}  # the first is being worked on; when each was asked last
        self._began = 0.0
        self._process: subprocess.Popen[str] | None = None
        self._closed = False

    def known(self, question: Question) -> bool:
        """Whether asking starts no work."""
        with self._lock:
            return question in self._answers or question in self._asked

    def ask(self, question: Question) -> Answer | Waiting:
        """The answer if it is known; otherwise it is worked on.

        Raises:
            Busy: too many others wait.
        """
        with self._lock:
            now = time.monotonic()
            if question in self._answers:
                return self._answers[question]
            if question not in self._asked:
                if len(self._asked) >= LONGEST_QUEUE or self._closed:
                    raise Busy
                self._asked[question] = now
                if len(self._asked) == 1:
                    self._began = now
                    threading.Thread(target=self._work, daemon=True).start()
            self._asked[question] = now
            ahead = list(self._asked).index(question)
            return Waiting(ahead, 0.0 if ahead else now - self._began)

    def close(self) -> None:
        """Ends what is being worked on."""
        with self._lock:
            self._closed, process = True, self._process
        if process:
            _end(process)

    def _work(self) -> None:
        while question := self._next():
            answer = self._answer(question)
            with self._lock:
                self._answers[question] = answer
                del self._asked[question]
                for oldest in list(self._answers)[:-KEPT]:
                    del self._answers[oldest]

    def _next(self) -> Question | None:
        with self._lock:
            self._began = time.monotonic()
            for question, last in list(self._asked.items()):
                if not self._closed and self._began - last < FORGOTTEN_S:
                    return question
                del self._asked[question]
            return None

    def _answer(self, question: Question) -> Answer:
        with self._lock:
            if self._closed:
                return Answer(problem="the studio is ending")
            process = subprocess.Popen(
                self._command(question),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C is for the server, which ends it
            )
            self._process = process
        with contextlib.suppress(psutil.Error):
            psutil.Process(process.pid).nice(GENTLE)
        try:
            out, err = process.communicate(timeout=self._limit_s)
        except subprocess.TimeoutExpired:
            _end(process)
            return Answer(problem=f"no plan was found in {self._limit_s / 60:.0f} minutes")
        if process.returncode == 0:
            with contextlib.suppress(ValueError):
                return Answer(json.loads(out))
        return Answer(problem=err.strip().removeprefix("error: ") or f"it ended with {process.returncode}")


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a plan and the processes that it started."""
    with contextlib.suppress(psutil.Error):
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for member in family:
            with contextlib.suppress(psutil.Error):
                member.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(FORCED_EXIT_S)
