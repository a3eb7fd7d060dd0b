"""The plan explorer: choices in, the page of a plan out, or one that says that it is being made."""

import re
from collections.abc import Iterable, Mapping
from functools import partial

from werkzeug.exceptions import BadRequest, Forbidden

from sft_play.config.methods import METHODS
from sft_play.machine.catalogue import known_gpus
from sft_play.model.architecture.published import published_models
from sft_play.report.html import Page, render
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
NO_METHOD = "Each method is planned for each common GPU alone; choose one of them for this GPU."


def explore(chosen: Mapping[str, str], planner: Planner, *, may_start: bool) -> str:
    """The page for what was chosen in the form, as HTML.

    Raises:
        BadRequest: a choice is not one of the form's.
        Forbidden: it would start work, which it may not.
    """
    choices = _choices()
    values = dict(chosen)
    if "model" in values:
        values["model"] = _meant(values["model"], [name for name, _ in choices["model"]])
    unknown = [name for name in chosen if not _is_choice(name, values[name], choices)]
    if unknown:
        raise BadRequest(f"the plan explorer has no choice {unknown[0]}={chosen[unknown[0]]}")
    values = {**FIRST, **dict.fromkeys(NUMBERS, ""), **values}
    titles = {"model": "Model", "gpu": "GPU", "gpus": "Number of GPUs", "method": "Method"}
    fields = [Field(name, title, choices[name], values[name]) for name, title in titles.items()]
    fields += [Field(name, title, (), values[name]) for name, title in NUMBERS.items()]
    shown = partial(render, template=TEMPLATE, here="/plan", fields=fields, problem="", seconds=0)
    if not chosen:
        return shown(question_page())
    if values["gpu"] and not values["method"]:
        return shown(question_page(), problem=NO_METHOD)
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


def _meant(typed: str, models: Iterable[str]) -> str:
    """The model of this name or last part, or the only one with it in its name; as typed if there is none."""
    low, names = typed.lower(), {name.lower(): name for name in models}
    ends = [name for name in names if name.rpartition("/")[2] == low]
    found = [low] if low in names else ends or [name for name in names if low in name]
    return names[found[0]] if len(found) == 1 else typed


def _is_choice(name: str, value: str, choices: Mapping[str, list[tuple[str, str]]]) -> bool:
    if name in NUMBERS:
        return not value or bool(NUMBER.fullmatch(value))
    return value in dict(choices.get(name, []))


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
