"""Answers about GPUs elsewhere, kept on disk: who asks the same again waits for no search."""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from sft_play.cache import DAY_S, recall, remember, state_of
from sft_play.machine.allocator import has_expandable_segments
from sft_play.machine.catalogue import SPECS_FILE
from sft_play.machine.prices import price_of
from sft_play.planning.request import Request
from sft_play.sizing.facts.step_facts import has_attention_packages

# What runs have left in the cache, and plans count on.
MEASURED = ("overhead", "probes", "profiles", "speeds")


def kept(question: str, request: Request, *about: object, find: Callable[[], Any]) -> Any:
    """The answer, a JSON value, as it was found before or is found now; what `find` raises is not kept.

    It is found each time where it depends on more than can be told: on the memory that is free on this
    machine, on a model's own code, or on a package with attention for the GPU that is here. Besides the
    request, it depends on `about`, of which `repr` tells one from another.
    """
    if not request.machine.what_if or not request.architecture.keeps or has_attention_packages():
        return find()
    known = (*about, *_told(request))
    answer = recall(question, *known)
    if answer is None:
        answer = json.loads(json.dumps(find()))  # as it will be read
        remember(answer, question, *known)
    return answer


def _told(request: Request) -> tuple[object, ...]:
    """All that plans for a request depend on, besides what `recall` knows; `repr` tells it apart."""
    faded = int(time.time() // DAY_S) if state_of("speeds") != state_of() else None  # what was timed, by day
    return (
        request.config.model_dump_json(),
        request.architecture.text,
        _rows_told(request.facts),
        request.machine.gpus,
        (request.processes, request.machines, request.budget_bytes),
        has_expandable_segments(),
        SPECS_FILE.read_text(encoding="utf-8"),
        price_of(request.machine.gpus[0].name),
        state_of(*MEASURED),
        faded,
    )


def _rows_told(value: object) -> object:
    if is_dataclass(value):
        return [_rows_told(getattr(value, each.name)) for each in fields(value) if each.compare]
    return hashlib.sha256(value.tobytes()).hexdigest() if isinstance(value, np.ndarray) else value
