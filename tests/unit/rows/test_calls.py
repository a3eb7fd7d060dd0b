"""Calls of tools are read as the templates of published models write them, and compared as calls."""

import re
from pathlib import Path

import pytest
import trl
from transformers.utils.chat_template_utils import render_jinja_template

from sft_play.rows.calls import calls_text, compared_text, history_text, without_reasoning

WEATHER = ("get_weather", {"city": "Paris", "days": 3, "opts": {"unit": "C"}})
TIME = ("get_time", {"zip": "90210"})  # a text of digits, whose type elements do not tell
TEMPLATES = Path(trl.__file__).parent / "chat_templates"


def message(*calls):
    written = [{"type": "function", "function": {"name": n, "arguments": given}} for n, given in calls]
    return {"role": "assistant", "content": "", "tool_calls": written}


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_5_think", "glm4moe", "llama3_1", "muse_glimmer"])
def test_calls_are_read_back_from_what_a_template_writes(name):
    calls = [WEATHER] if name == "llama3_1" else [WEATHER, TIME]  # it has one call a turn
    messages = [{"role": "user", "content": "hi"}, message(*calls)]
    template = (TEMPLATES / f"{name}.jinja").read_text()
    (text,), _ = render_jinja_template([messages], chat_template=template, bos_token="", eos_token="")
    answer = text.rpartition("hi")[2]
    special = re.sub(r"<\|.*?\|>", "", answer)  # as they are decoded
    assert compared_text(answer, calls) == compared_text(special, calls) == calls_text(calls)


@pytest.mark.parametrize(
    ("answer", "is_same"),
    [
        ('{"arguments": {"days": 3, "opts": {"unit": "C"}, "city": "Paris"}, "name": "get_weather"}', True),
        ('I look it up.\n{"name": "get_weather", "parameters": {"opts": {"unit": "C"}, "city": "Paris", "days": 3}} ok', True),
        ('<think>a{"name": "other", "arguments": {}}</think>get_weather{"city": "Paris", "opts": {"unit": "C"}, "days": 3}', True),
        ('functions.get_weather:0{"city": "Paris", "opts": {"unit": "C"}, "days": 3}', True),
        ('get_weather\n```json\n{"city": "Paris", "opts": {"unit": "C"}, "days": 3}\n```', True),
        ('{"function": {"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\", \\"days\\": 3, \\"opts\\": {\\"unit\\": \\"C\\"}}"}}', True),
        ('{"name": "get_weather", "arguments": {"city": "Paris", "days": "3", "opts": {"unit": "C"}}}', False),
        ('{"name": "get_weather", "arguments": {"city": "Paris", "opts": {"unit": "C"}}}', False),
        ('{"name": "get_time", "arguments": {"city": "Paris", "days": 3, "opts": {"unit": "C"}}}', False),
        ('{"name": "get_weather", "arguments": {"city": "Paris", "days": 3, "opts": {"unit": "C"}', False),
        ("It is sunny in Paris.", False),
        ("{" * 5000, False),
    ],
)  # fmt: skip
def test_a_call_is_the_same_with_its_keys_in_another_order_and_text_beside_it(answer, is_same):
    assert (compared_text(answer, [WEATHER]) == calls_text([WEATHER])) is is_same


def test_calls_of_a_turn_have_no_order_and_each_counts():
    both = '[{"name": "get_time", "arguments": {"zip": "90210"}}, {"name": "f", "arguments": {}}]'
    assert compared_text(both, [TIME]) == calls_text([("f", {}), TIME]) != calls_text([TIME])


def test_json_in_an_answer_that_is_no_call_is_left_as_it_is():
    assert compared_text('  {"name": "Ada", "age": 36} ', []) == '{"name": "Ada", "age": 36}'


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>\nlet me see\n</think>\n\n42", "42"),
        ("let me see\n</think>\n\n42", "42"),  # the prompt has opened it
        ("[THINK]so[/THINK]42", "42"),
        ("<think>not at its end", ""),
        (" 42 ", "42"),
        ("<thin>42", "<thin>42"),
    ],
)
def test_reasoning_is_left_out(text, answer):
    assert without_reasoning(text) == answer


def test_a_prompt_is_shown_with_what_was_said_before_it_in_short():
    system, question = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "a\nb"}
    assert history_text([system, question]) == "a\nb"
    tool = {"role": "tool", "content": "x" * 120}
    assert history_text([system, question, message(TIME), tool]) == (
        'user: a b\nassistant: get_time({"zip": "90210"})\ntool: ' + "x" * 120
    )
    lines = history_text([question, tool, question, tool, question]).splitlines()
    assert lines[0] == "(1 earlier messages)" and lines[1] == f"tool: {'x' * 100} ..." and len(lines) == 6
    assert history_text([]) == ""
