"""Traces steps in a second process before they are asked for, where there is a second core.

The process is a fork, which has the libraries at once. It needs neither GPUs nor threads, which forks lack.
"""

import gc
import logging
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import TYPE_CHECKING

from sft_play.errors import SftPlayError
from sft_play.machine.host import usable_cores
from sft_play.machine.parent_death import die_with_parent
from sft_play.sizing.step import StepSpec
from sft_play.sizing.timeline import StepTrace

if TYPE_CHECKING:
    from transformers import PretrainedConfig

PATIENCE_S = 60.0  # for one trace, which rarely takes more than a second
GONE = (OSError, EOFError, pickle.PickleError, AttributeError, TypeError)  # what talking to it may raise

_second: "SecondProcess | None" = None


class SecondProcess:
    """A process that traces steps in the order in which they are begun; the first one starts it."""

    def __init__(self) -> None:
        self._process: ForkProcess | None = None
        self._connection: Connection | None = None  # None also once it has failed
        self._begun: list[tuple[PretrainedConfig, StepSpec]] = []
        self._found: dict[int, StepTrace | None] = {}  # by index in that list

    def begin(self, config: "PretrainedConfig", spec: StepSpec) -> None:
        """Begins to trace a step."""
        if self._process is None:
            self._start()
        try:
            while self._connection and self._connection.poll():  # so that neither waits for the other to read
                self._receive()
            if self._connection:
                self._connection.send((len(self._begun), config, spec))
                self._begun.append((config, spec))
        except GONE:
            self.end()

    def take(self, config: "PretrainedConfig", spec: StepSpec) -> StepTrace | None:
        """The trace, as soon as it is there; None if it was not begun or that process could not make it."""
        begun = (number for number, one in enumerate(self._begun) if one[0] is config and one[1] == spec)
        number = next(begun, None)
        if number is None:
            return None
        try:
            while number not in self._found and self._connection:
                if self._connection.poll(PATIENCE_S):
                    self._receive()
                else:
                    self.end()
        except GONE:
            self.end()
        return self._found.pop(number, None)

    def end(self) -> None:
        """Ends the process, whatever it does."""
        connection, self._connection = self._connection, None
        if self._process and connection:
            self._process.kill()
            self._process.join()
            connection.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_trace_all, args=(theirs, os.getpid()), daemon=True)
        self._process.start()
        theirs.close()

    def _receive(self) -> None:
        assert self._connection
        number, trace = self._connection.recv()
        self._found[number] = trace


def _trace_all(connection: Connection, parent: int) -> None:
    """What the second process does."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # A thread of the parent may have held the locks of these streams.
    sys.stdout = sys.stderr = Path(os.devnull).open("w")
    logging.disable()
    gc.freeze()  # or the collector writes to, and so copies, all memory that is shared with the parent
    import torch

    from sft_play.sizing.trace import trace_step

    torch.set_num_threads(1)  # the threads of the parent are not here
    with suppress(EOFError, OSError):
        while True:
            number, config, spec = connection.recv()
            trace = None
            with suppress(SftPlayError):  # the parent finds out by itself
                trace = replace(trace_step(config, spec))  # without what was derived from it and is large
            connection.send((number, trace))


@contextmanager
def second_process() -> Iterator[None]:
    """Within this context, traces are made by two processes, unless there is only one core.

    Outside of it, and in nested ones, `begin` does nothing.
    """
    global _second
    if _second or usable_cores() < 2 or sys.platform != "linux":
        yield
        return
    _second = SecondProcess()
    try:
        yield
    finally:
        _second.end()
        _second = None


def begin(config: "PretrainedConfig", spec: StepSpec) -> None:
    """As in `SecondProcess`, if there is one."""
    if _second:
        _second.begin(config, spec)


def take(config: "PretrainedConfig", spec: StepSpec) -> StepTrace | None:
    """As in `SecondProcess`; None if there is none."""
    return _second.take(config, spec) if _second else None
