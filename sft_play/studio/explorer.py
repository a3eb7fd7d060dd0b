"""The plan explorer: choices in, the page of a plan out, or one that says that it is being made."""

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from werkzeug.exceptions import BadRequest, Forbidden

from sft_play.config.methods import METHODS
from sft_play.errors import ConfigError
from sft_play.machine.catalogue import known_gpus
from sft_play.model.architecture.published import hub_name, published_models
from sft_play.report.html import Page, render
from sft_play.report.layout import make_command
from sft_play.report.plan_page import TEMPLATE, Field, gpus_page, plan_page, question_page
from sft_play.studio.planner import Answer, Busy, Planner, Question, Waiting
from sft_play.units import counted, format_duration

ASKED_S = 2  # how often a page asks whether its plan is there
COUNTS = (1, 2, 4, 8, 16, 32, 64)
FIRST = {"model": "Qwen/Qwen3-8B", "gpu": "NVIDIA GeForce RTX 4090", "gpus": "", "method": "lora"}
NUMBERS = {
    "rows": "Rows",
    "tokens": "Tokens of a median row",
    "context": "Tokens of the longest row",
    "price": "Price of a GPU hour",
}
NUMBER = re.compile(r"\d{1,9}(\.\d{1,4})?")
FEWEST = "the fewest that fit"
EACH_GPU = "each common GPU"
NO_MODEL = 'Model: "{}" is not in the list, or is part of several names there. Any model of the Hub: {}'
NO_NUMBER = '{}: "{}" is not a number; write it like 5000 or 0.4.'
NO_METHOD = "Each method is planned for each common GPU alone; choose one of them for this GPU."


def explore(chosen: Mapping[str, str], planner: Planner, *, may_start: bool) -> str:
    """The page for what was chosen in the form, as HTML.

    Raises:
        BadRequest: it is nothing that the form can ask; what a person typed wrong is said on the page.
        Forbidden: it would start work, which it may not.
    """
    choices = _choices()
    models = [name for name, _ in choices["model"]]
    values = {name: value.strip() for name, value in chosen.items()}
    if "model" in values:
        values["model"] = _meant(values["model"], models)
    for name in values:
        if name not in {"model", *NUMBERS} and values[name] not in dict(choices.get(name, [])):
            raise BadRequest(f"the plan explorer has no choice {name}={chosen[name]}")
    values = {**FIRST, **dict.fromkeys(NUMBERS, ""), **values}
    titles = {"model": "Model", "gpu": "GPU", "gpus": "Number of GPUs", "method": "Method"}
    fields = [Field(name, title, choices[name], values[name]) for name, title in titles.items()]
    fields += [Field(name, title, (), values[name]) for name, title in NUMBERS.items()]
    shown = partial(render, template=TEMPLATE, here="/plan", fields=fields, problem="", seconds=0)
    if not chosen:
        return shown(question_page())
    if problem := _refused(values, models):
        return shown(question_page(), problem=problem)
    question = Question(
        model=values["model"],
        gpu=values["gpu"] or None,
        gpus=int(values["gpus"]) if values["gpus"] else None,
        method=values["method"] or None,
        **{name: values[name] or None for name in NUMBERS},
    )
    if not may_start and not planner.known(question):
        raise Forbidden("another site led here; open the plan explorer and press Plan")
    try:
        found = planner.ask(question)
    except Busy:
        return shown(question_page("Too many plans are waiting; try again later."))
    if isinstance(found, Waiting):
        return shown(question_page(_waiting(found)), seconds=ASKED_S)
    if found.problem:
        return shown(question_page(), problem=f"{found.problem}\n\nThe same in a shell: {question.command}")
    return shown(_answered(found, question))


def _meant(typed: str, models: Sequence[str]) -> str:
    """The model of this name for `make plan`, or the only one that has it in its name; otherwise as typed."""
    names, low = {name.lower(): name for name in models}, typed.lower()
    parts = [name for key, name in names.items() if low in key]
    with contextlib.suppress(ConfigError):
        low = hub_name(typed).lower()
    return names.get(low) or (parts[0] if len(parts) == 1 else typed)


def _refused(values: Mapping[str, str], models: Sequence[str]) -> str:
    """What a person typed or combined wrong; "" if nothing."""
    elsewhere = make_command("plan", MODEL="org/name")
    said = [] if values["model"] in models else [NO_MODEL.format(values["model"], elsewhere)]
    for name, title in NUMBERS.items():
        if values[name] and not NUMBER.fullmatch(values[name]):
            said.append(NO_NUMBER.format(title, values[name]))
    if values["gpu"] and not values["method"]:
        said.append(NO_METHOD)
    return "\n".join(said)


def _answered(found: Answer, question: Question) -> Page:
    if question.gpu is None or question.method is None:
        return gpus_page(found.tree, question.command)
    return plan_page(found.tree, question.model, question.gpu, question.method, question.command)


def _waiting(found: Waiting) -> str:
    if found.ahead:
        return f"{counted(found.ahead, 'other plan')} first. This page updates when the answer is ready."
    so_far = f" ({format_duration(found.seconds)} so far)" if found.seconds >= 1 else ""
    what = f"Planning{so_far}: seconds for one GPU, minutes for each common one."
    return f"{what} This page updates when the answer is ready."


def _choices() -> dict[str, list[tuple[str, str]]]:
    """Name of a field -> its values, with their texts."""
    models = sorted({model.name for model in published_models().values()}, key=str.lower)
    return {
        "model": _as_they_are(models),
        "gpu": [*_as_they_are(known_gpus()), ("", EACH_GPU)],
        "gpus": [("", FEWEST), *_as_they_are(COUNTS)],
        "method": [*METHODS.items(), ("", "each method")],
    }


def _as_they_are(values: Iterable[object]) -> list[tuple[str, str]]:
    return [(str(value), str(value)) for value in values]
