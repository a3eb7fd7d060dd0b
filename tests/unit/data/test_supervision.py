"""Which turns carry loss where a row, or data.learn_tool_calls, excludes some of them."""

import pytest

from sft_play.data.chat import asked_turns, make_chat
from sft_play.data.tokens import encode
from sft_play.data.workers import conversation_from_json, conversation_to_json
from sft_play.errors import DataError
from sft_play.rows.formats import Conversation, convert, detect_format
from sft_play.rows.json_files import Row
from tests.unit.data.test_chat import CHATML, MARKED, STYLES, learned_texts

USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ANSWERS = ("It is four.", "Five it is.", "Hello there.")


def converted(messages, **row):
    row = Row({"messages": messages, **row}, "f.jsonl", 7)
    return convert(row, detect_format(row))


def three_turns(*flags):
    """Three questions and answers, each answer with the keys of one of `flags`."""
    messages = []
    for answer, flag in zip(ANSWERS, flags, strict=True):
        messages += [{"role": "user", "content": "What?"}, {"role": "assistant", "content": answer, **flag}]
    return converted(messages)


def learned(tokenizer, conversation, supervise="assistant", **settings):
    rows = encode(make_chat(tokenizer, supervise, **settings), [conversation])[0]
    return [text.lstrip() for row in rows for text in learned_texts(tokenizer, row)]


@pytest.fixture(params=STYLES)
def style(request, make_tokenizer, raw_tokenizer):
    template, middle, end = STYLES[request.param]
    return make_tokenizer(template, raw_tokenizer, bos_token="<s>", eos_token="</s>"), middle, end


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        (({"train": False}, {"train": True}, {}), [1, 2]),
        (({}, {"weight": 0}, {"weight": 1}), [0, 2]),
        (({"loss_weight": 0.0}, {"train": False}, {"loss_weight": 1.0}), [2]),
    ],
)
def test_an_excluded_turn_is_seen_but_not_learned(style, flags, kept):
    tokenizer, middle, end = style
    conversation = three_turns(*flags)
    expected = [f"{ANSWERS[turn]}{middle if turn < 2 else end}" for turn in kept]
    assert learned(tokenizer, conversation) == expected
    (row,) = encode(make_chat(tokenizer, "assistant"), [conversation])[0]
    (plain,) = encode(make_chat(tokenizer, "assistant"), [three_turns({}, {}, {})])[0]
    assert row.input_ids.tolist() == plain.input_ids.tolist()


def test_text_after_the_last_turn_with_loss_is_left_out(make_tokenizer):
    conversation = three_turns({}, {}, {"train": False})
    for template in (CHATML, MARKED):
        tokenizer = make_tokenizer(template)
        assert learned(tokenizer, conversation) == [f"{answer}<|im_end|>" for answer in ANSWERS[:2]]
        (row,) = encode(make_chat(tokenizer, "assistant"), [conversation])[0]
        assert tokenizer.decode(row.input_ids).endswith("Five it is.<|im_end|>")


def test_last_is_the_last_turn_that_is_not_excluded(make_tokenizer):
    conversation = three_turns({}, {}, {"train": False})
    tokenizer = make_tokenizer(CHATML)
    assert learned(tokenizer, conversation, "last") == ["Five it is.<|im_end|>"]
    (asked,) = asked_turns(make_chat(tokenizer, "assistant"), conversation)
    assert conversation.messages[asked]["content"] == "Five it is."


def test_a_conversation_without_a_turn_to_learn_gives_no_row(make_tokenizer):
    assert learned(make_tokenizer(CHATML), three_turns(*[{"weight": 0}] * 3)) == []


def test_a_template_does_not_see_what_is_excluded_and_process_writes_it_back():
    conversation = three_turns({}, {"train": False}, {})
    assert conversation.untrained == (3,)
    assert all(set(message) == {"role", "content"} for message in conversation.messages)
    assert converted(conversation.as_row()["messages"]).untrained == (3,)
    assert conversation_from_json(conversation_to_json(conversation)) == conversation


def test_an_added_system_prompt_shifts_what_is_excluded():
    row = Row({"messages": [USER, {**ASSISTANT, "train": False}, USER, ASSISTANT]}, "f", 1)
    assert convert(row, "messages", "Be brief.").untrained == (2,)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({**ASSISTANT, "weight": 0.5}, "messages[1].weight is 0.5; expected 0 or 1"),
        ({**ASSISTANT, "train": "no"}, "messages[1].train is 'no'; expected true or false"),
        ({**ASSISTANT, "train": True, "weight": 0}, "messages[1]: train and weight contradict each other"),
        ({**USER, "train": True}, "messages[1].train is true on a message of role user"),
    ],
)
def test_a_flag_that_cannot_be_followed_is_refused(message, said):
    with pytest.raises(DataError) as error:
        converted([USER, message, USER, ASSISTANT])
    assert str(error.value).startswith("f.jsonl:7: ") and said in str(error.value)


def test_excluded_turns_contradict_loss_on_all_tokens(make_tokenizer):
    with pytest.raises(DataError, match=r"f.jsonl:7: messages\[1\] is excluded .* data.supervise=all"):
        learned(make_tokenizer(CHATML), three_turns({"train": False}, {}, {}), "all")


def test_tool_calls_are_learned_or_not_as_the_setting_says(make_tokenizer):
    template = CHATML.replace("m.content +", "m.content + (m.tool_calls | tojson if m.tool_calls else '') +")
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    conversation = Conversation((USER, call, {"role": "tool", "content": "2"}, ASSISTANT), source="f:1")
    tokenizer = make_tokenizer(template)
    both = learned(tokenizer, conversation)
    assert len(both) == 2 and '"add"' in both[0] and both[1] == "a<|im_end|>"
    assert learned(tokenizer, conversation, learn_tool_calls=False) == ["a<|im_end|>"]


def test_a_template_that_drops_tool_calls_is_refused_unless_they_are_not_learned(make_tokenizer):
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    conversation = Conversation((USER, call, {"role": "tool", "content": "2"}, ASSISTANT), source="f:1")
    for template in (CHATML, MARKED):
        tokenizer = make_tokenizer(template)
        said = r"f:1: the chat template does not render the tool calls of messages\[1\] \('add'\)"
        with pytest.raises(DataError, match=said):
            learned(tokenizer, conversation)
        assert learned(tokenizer, conversation, learn_tool_calls=False) == ["a<|im_end|>"]


def test_list_content_may_say_value_and_hold_reasoning_and_calls():
    content = [
        {"type": "reasoning", "value": "hm"},
        {"type": "text", "value": "Let me "},
        {"type": "text", "value": "add."},
        {"type": "tool_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
    ]
    conversation = converted(
        [
            {"role": "user", "content": [{"type": "text", "value": "q"}], "loss_weight": 0.0},
            {"role": "assistant", "content": content},
        ]
    )
    assert conversation.messages == (
        USER,
        {"role": "assistant", "content": "Let me add.", "reasoning_content": "hm", "tool_calls": [CALL]},
    )
    with pytest.raises(DataError, match=r"messages\[1\]\.content\[0\]\.value is 5"):
        converted([USER, {"role": "assistant", "content": [{"type": "text", "value": 5}]}])
