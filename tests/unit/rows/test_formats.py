import pytest

from sft_play.errors import DataError
from sft_play.rows.formats import FORMATS, Conversation, convert, detect_format
from sft_play.rows.json_files import Row

USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def converted(data, **kwargs):
    row = Row(data, "f.jsonl", 7)
    return convert(row, detect_format(row), **kwargs)


@pytest.mark.parametrize(
    ("name", "data", "messages"),
    [
        ("messages", {"messages": [SYSTEM, USER, ASSISTANT]}, [SYSTEM, USER, ASSISTANT]),
        (
            "messages",
            {"messages": [{"role": "developer", "content": "s"}, USER, ASSISTANT]},
            [SYSTEM, USER, ASSISTANT],
        ),
        (
            "messages",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "q"}, {"type": "text", "text": "!"}],
                    },
                    ASSISTANT,
                ]
            },
            [{"role": "user", "content": "q!"}, ASSISTANT],
        ),
        (
            "sharegpt",
            {
                "system": "s",
                "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
            },
            [SYSTEM, USER, ASSISTANT],
        ),
        ("sharegpt", {"conversations": [USER, ASSISTANT]}, [USER, ASSISTANT]),
        ("alpaca", {"instruction": "q", "input": "", "output": "a"}, [USER, ASSISTANT]),
        (
            "alpaca",
            {"instruction": "q", "input": "i", "output": "a", "system": "s", "history": [["q", "a"]]},
            [SYSTEM, USER, ASSISTANT, {"role": "user", "content": "q\n\ni"}, ASSISTANT],
        ),
        ("prompt_completion", {"prompt": "q", "completion": "a"}, [USER, ASSISTANT]),
        (
            "prompt_completion",
            {"prompt": [SYSTEM, USER], "completion": [ASSISTANT]},
            [SYSTEM, USER, ASSISTANT],
        ),
        ("question_answer", {"question": "q", "answer": "a", "extra": 5}, [USER, ASSISTANT]),
        ("system_user_assistant", {"system": "s", "user": "q", "assistant": "a"}, [SYSTEM, USER, ASSISTANT]),
        ("system_user_assistant", {"system": None, "user": "q", "assistant": "a"}, [USER, ASSISTANT]),
    ],
)
def test_each_format_is_detected_from_its_keys_and_becomes_messages(name, data, messages):
    assert detect_format(Row(data, "f", 1)) == name
    conversation = converted(data)
    assert list(conversation.messages) == messages
    assert conversation.source == "f.jsonl:7"


def test_plain_text_has_no_messages():
    assert converted({"text": "once"}) == Conversation((), text="once", source="f.jsonl:7")


def test_tool_calls_and_tool_results_are_kept_with_arguments_as_objects():
    asks = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}],
    }
    result = {"role": "tool", "tool_call_id": "1", "name": "add", "content": "2"}
    conversation = converted({"messages": [USER, asks, result, ASSISTANT], "tools": [TOOL]})
    assert conversation.messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", **CALL}],
    }
    assert conversation.messages[2] == result
    assert conversation.tools == [TOOL]


def test_sharegpt_function_calls_and_tools_as_json_text_are_understood():
    turns = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "a"},
    ]
    conversation = converted({"conversations": turns, "tools": '[{"name": "add"}]'})
    assert conversation.messages[1]["tool_calls"] == [CALL]
    assert [message["role"] for message in conversation.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert conversation.tools == [{"name": "add"}]


def test_reasoning_is_kept_under_the_name_that_templates_read():
    messages = [USER, {"role": "assistant", "content": "a", "thinking": "hm"}]
    assert converted({"messages": messages}).messages[1] == {**ASSISTANT, "reasoning_content": "hm"}


def test_the_system_prompt_is_added_only_where_there_is_none():
    assert converted({"messages": [USER, ASSISTANT]}, system_prompt="new").messages[0]["content"] == "new"
    assert converted({"messages": [SYSTEM, USER, ASSISTANT]}, system_prompt="new").messages == (
        SYSTEM,
        USER,
        ASSISTANT,
    )
    blank = {"role": "system", "content": " "}
    assert converted({"messages": [blank, USER, ASSISTANT]}).messages == (USER, ASSISTANT)


def test_the_prompt_of_prompt_completion_messages_is_context_also_behind_an_added_system_prompt():
    data = {"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT]}
    assert converted(data).context == 3
    assert converted(data, system_prompt="s").context == 4


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"messages": [SYSTEM, USER]}, "no assistant turn"),
        ({"question": "q", "answer": ""}, "blank assistant turn"),
        ({"prompt": "q", "completion": " \n"}, "blank assistant turn"),
        ({"messages": [USER, {"role": "assistant", "content": ""}, USER, ASSISTANT]}, "blank assistant turn"),
        ({"prompt": [USER, ASSISTANT], "completion": [USER]}, "no assistant turn"),
        ({"text": "  "}, "blank text"),
    ],
)
def test_a_row_with_nothing_to_train_on_is_dropped_with_the_reason(data, reason):
    assert converted(data) == reason


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"messages": None}, "messages is missing or null; expected a list of messages"),
        ({"messages": []}, "messages is an empty list; expected a list of messages"),
        ({"messages": "hello"}, "messages is 'hello'; expected a list"),
        ({"messages": ["hello"]}, "messages[0] is 'hello'; expected an object"),
        (
            {"messages": [USER, {"role": "assistant", "content": None}]},
            "messages[1].content is missing or null; expected a string",
        ),
        ({"messages": [USER, {"role": "assistant"}]}, "messages[1].content is missing or null"),
        (
            {"messages": [USER, {"role": "assistant", "content": 5}]},
            "messages[1].content is 5; expected a string",
        ),
        (
            {"messages": [{"role": "user", "content": ""}, ASSISTANT]},
            "messages[0].content is an empty string; expected a non-blank string",
        ),
        ({"messages": [USER, {"role": "assistant", "content": [["a"]]}]}, "messages[1].content[0] is a list"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}, ASSISTANT]},
            "video and audio are not supported",
        ),
        (
            {"messages": [{"role": "wizard", "content": "q"}]},
            "messages[0].role is 'wizard'; expected one of system, ",
        ),
        ({"messages": [{"role": ["user"], "content": "q"}]}, "messages[0].role is a list"),
        ({"messages": [{"content": "q"}]}, "messages[0].role is missing"),
        ({"conversations": [{"from": "alien", "value": "q"}]}, "conversations[0].from is 'alien'"),
        (
            {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": ["add"]}]},
            "messages[1].tool_calls[0] is 'add'",
        ),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{oops"}]}]},
            "tool_calls[0].function.arguments is a string but not valid JSON",
        ),
        ({"messages": [USER, ASSISTANT], "tools": {"name": "f"}}, "tools is an object"),
        ({"question": "q", "answer": None}, "answer is missing or null"),
        ({"question": "", "answer": "a"}, "question is an empty string"),
        ({"instruction": "q", "output": 4.5}, "output is 4.5"),
        ({"instruction": "q", "output": "a", "history": ["x"]}, "history[0] is 'x'; expected a pair"),
        ({"instruction": "q", "output": "a", "history": 3}, "history is 3; expected a list of pairs"),
        ({"messages": [USER, ASSISTANT], "tools": "[" * 200 + "]" * 200}, "nested more than 100 levels deep"),
        ({"prompt": [USER], "completion": "a"}, "completion is 'a'; expected a list of messages"),
        ({"text": None}, "text is missing or null"),
        ({"question": "\ud800", "answer": "a"}, "unpaired surrogate"),
        ({"messages": [USER, ASSISTANT], "tools": [{"name": "\ud800"}]}, "tools has an unpaired surrogate"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": "\\ud800"}'}]}
                ]
            },
            "messages[0].tool_calls[0].function has an unpaired surrogate",
        ),
    ],
)
def test_a_wrong_row_is_named_with_file_line_and_key(data, said):
    with pytest.raises(DataError) as error:
        converted(data)
    assert str(error.value).startswith("f.jsonl:7: ")
    assert said in str(error.value)


def test_a_later_row_without_the_keys_of_the_first_is_refused():
    with pytest.raises(
        DataError,
        match=r"f:9: key 'answer' is missing; format question_answer needs question, answer \(found q",
    ):
        convert(Row({"question": "q"}, "f", 9), "question_answer")
    with pytest.raises(DataError, match=r"format question_answer needs question, answer \(found no keys\)"):
        convert(Row({}, "f", 9), "question_answer")


def test_a_system_prompt_beside_a_system_message_is_taken_once_or_refused():
    for key, rest in (("conversations", {}), ("chosen", {"rejected": "b"})):
        format = "sharegpt" if key == "conversations" else "preference"
        for given, own, taken in (("s", "s", "s"), ("s", " s\n", "s"), ("s", "", "s"), (" ", "s", "s")):
            turns = [{"role": "system", "content": own}, USER, ASSISTANT]
            found = convert(Row({"system": given, key: turns, **rest}, "f", 1), format)
            assert found.messages == ({"role": "system", "content": taken}, USER, ASSISTANT)
        row = Row({"system": "s", key: [{"role": "system", "content": "t"}, USER, ASSISTANT], **rest}, "f", 7)
        with pytest.raises(
            DataError, match=rf"^f:7: system is 's'; expected 't', which is {key}\[0\], or none"
        ):
            convert(row, format)


def test_a_blank_turn_that_carries_no_loss_is_context():
    for blank in ("", " \n"):
        turn = {"role": "assistant", "content": blank}
        found = converted({"messages": [USER, {**turn, "train": False}, USER, ASSISTANT]})
        assert found.messages == (USER, turn, USER, ASSISTANT)
        assert found.untrained == (1,)
        assert (
            converted({"messages": [USER, {**turn, "weight": 1}, USER, ASSISTANT]}) == "blank assistant turn"
        )


@pytest.mark.parametrize("name", FORMATS)
def test_the_example_of_a_format_is_of_that_format_and_of_no_other(name):
    known, row = FORMATS[name], Row(FORMATS[name].example, "f", 1)
    assert set(known.keys) <= set(known.example) <= {*known.keys, *known.others}
    if known.detected:
        assert detect_format(row) == name
    converted = convert(row, name)
    assert isinstance(converted, Conversation) and bool(converted.messages) == bool(known.reader)


def test_an_unknown_format_lists_the_known_ones():
    with pytest.raises(DataError) as error:
        detect_format(Row({"foo": 1}, "f", 1))
    assert all(name in str(error.value) for name in FORMATS)


def test_the_chosen_answer_is_trained_on_if_that_was_asked_for():
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    whole = {"prompt": "q", "chosen": [USER, ASSISTANT], "rejected": [USER, {**ASSISTANT, "content": "b"}]}
    after = {"prompt": [SYSTEM, USER], "chosen": [ASSISTANT], "rejected": [{**ASSISTANT, "content": "b"}]}
    for data, messages, context in (
        (pair, (USER, ASSISTANT), 0),
        (whole, (USER, ASSISTANT), 0),
        (after, (SYSTEM, USER, ASSISTANT), 2),
        ({**pair, "system": "s"}, (SYSTEM, USER, ASSISTANT), 0),
    ):
        found = convert(Row(data, "f", 1), "preference")
        assert (found.messages, found.context) == (messages, context)
        with pytest.raises(DataError, match="f:1: the row has a chosen and a rejected answer.*=preference"):
            detect_format(Row(data, "f", 1))
    with pytest.raises(DataError, match="f:1: prompt is missing or null; expected a non-blank string"):
        convert(Row({"chosen": "a", "rejected": "b"}, "f", 1), "preference")


def test_keys_in_capitals_are_told_how_they_are_written():
    with pytest.raises(DataError, match=r"keys Question, Answer; write them as question, answer\."):
        detect_format(Row({"Question": "q", "Answer": "a"}, "f", 1))


def test_a_key_with_a_space_is_shown_in_quotes():
    with pytest.raises(DataError, match="in quotes: 'data.columns.prompt=my question'"):
        detect_format(Row({"id": 1, "my question": "q", "my answer": "a"}, "f", 1))


def test_a_row_as_written_by_process_reads_back_the_same():
    for data in (
        {"text": "once"},
        {"messages": [USER, ASSISTANT], "tools": [TOOL]},
        {"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT]},
    ):
        conversation = converted(data)
        assert converted(conversation.as_row()) == conversation
