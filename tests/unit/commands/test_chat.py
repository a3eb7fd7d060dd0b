"""A chat offers tools, keeps calls as calls, and takes what they returned; no model is needed for that."""

import json
import re

import pytest

from sft_play.commands.chat import (
    Dialogue,
    answer_message,
    fit_history,
    run_chat_command,
    said_by_user,
)
from sft_play.rows.images import MARK

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}


def test_tools_of_a_file_are_offered_from_then_on(tmp_path):
    file = tmp_path / "my tools.json"
    file.write_text(json.dumps(TOOLS))
    state = Dialogue(turns=[{"role": "user", "content": "hi"}])
    assert run_chat_command(state, f"/tools {file}") == "tools: weather; started a new conversation"
    assert state.tools == TOOLS and state.turns == []
    assert run_chat_command(state, "/tools") == "tools: (none); started a new conversation"
    assert state.tools is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file or directory"),
        ("{", "Expecting property name"),
        ('{"name": "weather"}', "tools is an object .*; expected a list of JSON schemas"),
        ("[1]", "expected a list of JSON schemas"),
    ],
)
def test_what_are_no_tools_changes_nothing(tmp_path, text, said):
    file = tmp_path / "tools.json"
    if text is not None:
        file.write_text(text)
    state = Dialogue(tools=TOOLS, turns=[{"role": "user", "content": "hi"}])
    assert re.search(f"cannot read .*{said}", str(run_chat_command(state, f"/tools {file}")))
    assert state.tools == TOOLS and len(state.turns) == 1


def test_a_call_is_kept_as_a_call_and_its_result_is_that_of_a_tool():
    said = "<think>\nOslo it is\n</think>\n\n<tool_call>" + json.dumps(CALL["function"]) + "</tool_call>"
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert answer_message(said, tools=True) == {**called, "reasoning_content": "Oslo it is"}
    assert answer_message(said.partition("\n\n")[2], tools=True) == called
    assert answer_message(said, tools=False) == {"role": "assistant", "content": said}
    assert answer_message("It is sunny.", tools=True) == {"role": "assistant", "content": "It is sunny."}
    state = Dialogue()
    assert said_by_user(state, "/result sunny") is None
    assert run_chat_command(state, "/result sunny") == "no call was made; a call is made by an answer"
    state.turns = [{"role": "user", "content": "Oslo?"}, called]
    assert said_by_user(state, "/result sunny") == {"role": "tool", "content": "sunny"}
    assert said_by_user(state, "/reset") is None
    assert said_by_user(state, "Why?") == {"role": "user", "content": "Why?"}


def test_a_question_is_forgotten_with_its_calls_and_their_results():
    roles = ("user", "assistant", "tool", "assistant", "user")
    state = Dialogue(turns=[{"role": role, "content": "x" * 20} for role in roles])

    def render(messages):
        return [0] * sum(len(message["content"]) for message in messages)

    ids, room, dropped = fit_history(state, render, limit=100, max_new_tokens=50)
    assert (len(ids), room, dropped) == (20, 50, 4)
    assert [turn["role"] for turn in state.turns] == ["user"]


def test_a_message_that_was_not_sent_leaves_its_images_to_the_next_one():
    image = {"role": "user", "content": MARK, "images": ["1.png"]}
    chat = Dialogue(draft=image)
    chat.turns += [chat.question("what is it?")]
    assert chat.turns == [image | {"content": f"{MARK}what is it?"}]
    chat.take_back()
    assert chat.turns == [] and chat.question("and now?") == image | {"content": f"{MARK}and now?"}
    chat.turns += [chat.question("no image")]
    chat.take_back()
    assert "images" not in chat.question("still none")
