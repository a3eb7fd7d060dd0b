import importlib.util
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from sft_play.data.chat import UNSTOPPED, answer_text, asked_turns, make_chat, render_rows
from sft_play.data.template import use_template
from sft_play.data.tokens import encode
from sft_play.errors import ConfigError, DataError
from sft_play.parts import IGNORED
from sft_play.rows.formats import Conversation

# Each in the manner of a family of models; written for these tests.
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim + '<end_of_turn>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
PHI = (  # one more token closes the whole conversation
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
)
GLM = (  # the marker of the next turn ends one
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
HEADINGS = (  # no token ends a turn, and the prompt ends in a space
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
QWEN3 = (  # thinking is shown after the last question only
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}{% if m.role != 'assistant' %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% else %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in m.content else '' %}"
    "{% set said = m.content.split('</think>')[-1].lstrip('\\n') %}{{ '<|im_start|>assistant\\n' }}"
    "{% if loop.index0 > ns.last %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' + said }}{% else %}{{ said }}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED = CHATML.replace("m.role + '\\n' + m.content + '<|im_end|>\\n' }}", "m.role + '\\n' }}BODY").replace(
    "BODY",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>\\n' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}",
)
MARKED_WITHOUT_END = MARKED.replace(
    "{{ m.content + '<|im_end|>\\n' }}{% endgeneration %}",
    "{{ m.content }}{% endgeneration %}{{ '<|im_end|>\\n' }}",
)
STYLES = {  # template, and what follows an answer in the middle and at the end
    "chatml": (CHATML, "<|im_end|>", "<|im_end|>"),
    "llama3": (LLAMA3, "<|eot_id|>", "<|eot_id|>"),
    "gemma": (GEMMA, "<end_of_turn>", "<end_of_turn>"),
    "mistral": (MISTRAL, "</s>", "</s>"),
    "phi": (PHI, "<|end|>", "<|end|>\n</s>"),
    "glm": (GLM, "<|user|>", "</s>"),
    "headings": (HEADINGS, "\n", "\n</s>"),
    "marked": (MARKED, "<|im_end|>", "<|im_end|>"),
    "marked without end": (MARKED_WITHOUT_END, "<|im_end|>", "<|im_end|>"),
}


def talk(*turns, **kwargs):
    roles = "user", "assistant"
    messages = tuple({"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns))
    return Conversation(messages, source="f.jsonl:3", **kwargs)


TWO_TURNS = talk("What is two plus two?", "It is four.", "And three plus two?", "Five it is.")


def learned_texts(tokenizer, row):
    """The runs of learned tokens, decoded; and the labels must be the tokens themselves."""
    learned = row.labels != IGNORED
    assert (row.labels[learned] == row.input_ids[learned]).all()
    assert row.labels[0] == IGNORED
    edges = np.flatnonzero(np.diff(np.concatenate([[False], learned, [False]]).astype(int)))
    return [tokenizer.decode(row.input_ids[a:b]) for a, b in edges.reshape(-1, 2)]


def rows_of(tokenizer, conversation, supervise="assistant"):
    return encode(make_chat(tokenizer, supervise), [conversation])[0]


@pytest.fixture(params=STYLES)
def style(request, make_tokenizer, raw_tokenizer):
    template, middle, end = STYLES[request.param]
    return make_tokenizer(template, raw_tokenizer, bos_token="<s>", eos_token="</s>"), middle, end


def test_exactly_the_answers_and_their_end_tokens_are_learned(style):
    tokenizer, middle, end = style
    (row,) = rows_of(tokenizer, TWO_TURNS)
    assert [text.lstrip() for text in learned_texts(tokenizer, row)] == [
        f"It is four.{middle}",
        f"Five it is.{end}",
    ]


def test_last_learns_the_last_answer_only_and_sees_the_same_text(style):
    tokenizer, _, end = style
    (row,) = rows_of(tokenizer, TWO_TURNS, "last")
    assert [text.lstrip() for text in learned_texts(tokenizer, row)] == [f"Five it is.{end}"]
    assert row.input_ids.tolist() == rows_of(tokenizer, TWO_TURNS)[0].input_ids.tolist()


def test_all_learns_every_token_but_the_first(style):
    tokenizer, _, end = style
    (row,) = rows_of(tokenizer, TWO_TURNS, "all")
    assert (row.labels[1:] == row.input_ids[1:]).all()
    assert row.labels[0] == IGNORED
    assert tokenizer.decode(row.input_ids).endswith(f"Five it is.{end}")


def test_the_tokens_are_those_of_the_whole_text_as_the_template_renders_it(style):
    tokenizer, *_ = style
    (row,) = rows_of(tokenizer, TWO_TURNS)
    whole = tokenizer.apply_chat_template(list(TWO_TURNS.messages), tokenize=True, return_dict=False)
    common = (
        min(len(whole), len(row.input_ids)) - 2
    )  # the ends differ by template white space and the added end token
    assert row.input_ids[:common].tolist() == whole[:common]


def test_the_prompt_is_what_the_model_is_given_at_inference(style):
    tokenizer, *_ = style
    (row,) = rows_of(tokenizer, TWO_TURNS, "last")
    given = tokenizer.apply_chat_template(
        list(TWO_TURNS.messages[:-1]), add_generation_prompt=True, tokenize=False
    )
    first = int(np.flatnonzero(row.labels != IGNORED)[0])
    assert tokenizer.decode(row.input_ids[:first]).strip() == given.strip()


def test_what_comes_after_the_last_answer_is_not_part_of_the_row(style):
    tokenizer, *_ = style
    longer = talk(*[message["content"] for message in TWO_TURNS.messages], "Hello there, friend!")
    assert (
        rows_of(tokenizer, longer)[0].input_ids.tolist()
        == rows_of(tokenizer, TWO_TURNS)[0].input_ids.tolist()
    )


def test_the_end_token_is_learned_also_where_it_is_the_padding_token(make_tokenizer):
    tokenizer = make_tokenizer(CHATML, eos_token="<|im_end|>", pad_token="<|im_end|>")
    (row,) = rows_of(tokenizer, talk("What?", "Four."))
    assert row.labels[-1] == tokenizer.pad_token_id == tokenizer.eos_token_id


def test_an_answer_that_holds_white_space_and_other_scripts_is_learned_whole(style):
    tokenizer, _, end = style
    answer = "Zwölf 🙂 猫\n\n  indented\ttoo"
    (row,) = rows_of(tokenizer, talk("What?", answer))
    if (
        tokenizer.backend_tokenizer.pre_tokenizer.__class__.__name__ == "ByteLevel"
    ):  # the other knows no such letters
        assert [text.lstrip() for text in learned_texts(tokenizer, row)] == [answer + end]
    else:
        assert (row.labels[-3:] != IGNORED).all()


def test_the_two_ways_to_find_answers_agree_with_each_other_and_with_transformers(make_tokenizer):
    plain, marked = make_tokenizer(CHATML), make_tokenizer(MARKED)
    by_prefix, by_marks = rows_of(plain, TWO_TURNS)[0], rows_of(marked, TWO_TURNS)[0]
    assert by_prefix.labels.tolist() == by_marks.labels.tolist()
    theirs = marked.apply_chat_template(
        list(TWO_TURNS.messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    after_end = marked.convert_tokens_to_ids("<|im_end|>")
    ids = theirs["input_ids"]
    expected = [m and not (i and ids[i - 1] == after_end) for i, m in enumerate(theirs["assistant_masks"])]
    assert (by_marks.labels != IGNORED).tolist() == expected[: len(by_marks.labels)]


def test_a_turn_that_the_template_later_rewrites_becomes_a_row_of_its_own(make_tokenizer):
    tokenizer = make_tokenizer(QWEN3)
    thinking = talk(
        "What?", "<think>\nHm.\n</think>\n\nFour.", "And?", "<think>\nOh.\n</think>\n\nFive.", "So?", "Two."
    )
    rows = rows_of(tokenizer, thinking)
    assert [learned_texts(tokenizer, row) for row in rows] == [
        ["<think>\nHm.\n</think>\n\nFour.<|im_end|>"],
        ["<think>\nOh.\n</think>\n\nFive.<|im_end|>"],
        ["<think>\n\n</think>\n\nTwo.<|im_end|>"],
    ]
    for turn, row in zip(
        (1, 3, 5), rows, strict=True
    ):  # given is what is given at inference: history without thoughts
        given = tokenizer.apply_chat_template(
            list(thinking.messages[:turn]), add_generation_prompt=True, tokenize=False
        )
        assert tokenizer.decode(row.input_ids).startswith(given)
    assert [learned_texts(tokenizer, row) for row in rows_of(tokenizer, thinking, "last")] == [
        ["<think>\n\n</think>\n\nTwo.<|im_end|>"]
    ]


def test_turns_of_one_question_stay_in_one_row_of_a_rewriting_template(make_tokenizer):
    tokenizer = make_tokenizer(QWEN3)
    messages = [{"role": role, "content": text} for role, text in
                [("user", "What?"), ("assistant", "A call."), ("tool", "2"), ("assistant", "Two.")]]  # fmt: skip
    (row,) = rows_of(tokenizer, Conversation(tuple(messages), source="f:1"))
    assert learned_texts(tokenizer, row) == [
        f"<think>\n\n</think>\n\n{text}<|im_end|>" for text in ("A call.", "Two.")
    ]


def test_a_prompt_that_the_template_does_not_write_before_the_answer_is_an_error_naming_the_row(
    make_tokenizer,
):
    tokenizer = make_tokenizer(
        CHATML.replace("'<|im_start|>assistant\\n' }}", "'<|im_start|>assistant\\n<think>\\n' }}")
    )
    with pytest.raises(
        DataError, match=r"f.jsonl:3: messages\[3\] cannot be trained on .*'<think>\\n'.*'Five it is"
    ):
        rows_of(tokenizer, TWO_TURNS)


def test_a_prompt_may_end_in_white_space_that_the_template_does_not_write(make_tokenizer):
    tokenizer = make_tokenizer(CHATML.replace("'<|im_start|>assistant\\n' }}", "'<|im_start|>assistant ' }}"))
    (row,) = rows_of(tokenizer, TWO_TURNS, "last")
    assert learned_texts(tokenizer, row) == ["\nFive it is.<|im_end|>"]


def test_a_line_break_that_inference_gives_but_no_row_has_is_an_error_naming_the_row(make_tokenizer):
    answered = "m.role + '\\n' + ('<think></think>' if m.role == 'assistant' else '')"  # as Nemotron 3
    template = CHATML.replace("m.role + '\\n'", answered).replace(
        "assistant\\n' }}", "assistant\\n<think>\\n' }}"
    )
    with pytest.raises(DataError, match=r"f.jsonl:3: messages\[3\] cannot .* has '</think>Five it is"):
        rows_of(make_tokenizer(template), TWO_TURNS)


def test_of_a_far_too_long_text_no_less_is_tokenized_than_shows_that_it_is_too_long(make_tokenizer):
    from tokenizers import Tokenizer, models, pre_tokenizers

    word = "x" * 99  # many characters a token: the first guess at how much text is enough is too short
    raw = Tokenizer(
        models.WordLevel({"<|endoftext|>": 0, "<pad>": 1, "<unk>": 2, word: 3}, unk_token="<unk>")
    )
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    chat = make_chat(make_tokenizer(raw=raw), "all", max_tokens=10)
    rows = encode(chat, [Conversation((), text=" ".join([word] * count)) for count in (9, 10, 1000)])
    assert [len(row.input_ids) for (row,) in rows[:2]] == [10, 11]  # with the end token
    assert 10 < len(rows[2][0].input_ids) < 1000


def test_a_template_that_shows_no_text_is_an_error_naming_the_row(make_tokenizer):
    tokenizer = make_tokenizer(
        CHATML.replace("m.content", "('' if m.content is string else m.content[0].text)")
    )
    with pytest.raises(
        DataError, match=r"f.jsonl:3: the chat template does not render the text of messages\[3\]"
    ):
        rows_of(tokenizer, TWO_TURNS)


def test_a_conversation_that_the_template_refuses_is_an_error_naming_the_row(make_tokenizer):
    tokenizer = make_tokenizer(GEMMA, bos_token="<bos>")
    system = {"role": "system", "content": "You are brief."}
    with pytest.raises(
        DataError, match=r"f.jsonl:3: .*roles: system, user, assistant.*System role not supported"
    ):
        rows_of(tokenizer, Conversation((system, *TWO_TURNS.messages[:2]), source="f.jsonl:3"))
    with pytest.raises(DataError, match="must alternate"):
        rows_of(tokenizer, Conversation((*TWO_TURNS.messages[:2], TWO_TURNS.messages[1]), source="f.jsonl:3"))


def test_rows_that_are_rendered_together_are_those_that_each_is_alone(make_tokenizer):
    """Of one turn and of several, with and without tools, plain text, and one that becomes two rows."""
    chat = make_chat(make_tokenizer(QWEN3), "assistant")
    thought = "<think>\nHm.\n</think>\n\nFour."
    rows = [
        TWO_TURNS,
        talk("What?", thought, "And?", "Five."),
        Conversation((), text="Plain text."),
        talk("So?", "Two.", tools=[{"name": "adder"}]),
        talk("What?", "Four."),
    ]
    together, alone = encode(chat, rows), [encode(chat, [row])[0] for row in rows]
    assert [len(parts) for parts in together] == [2, 2, 1, 1, 1]
    for parts, expected in zip(together, alone, strict=True):
        for part, same in zip(parts, expected, strict=True):
            assert np.array_equal(part.input_ids, same.input_ids)
            assert np.array_equal(part.labels, same.labels)


def test_a_greeting_before_the_first_question_and_a_given_prompt_are_not_learned(make_tokenizer):
    tokenizer = make_tokenizer(CHATML)
    hello = {"role": "assistant", "content": "Hello there, friend!"}
    (row,) = rows_of(tokenizer, Conversation((hello, *TWO_TURNS.messages[:2])))
    assert learned_texts(tokenizer, row) == ["It is four.<|im_end|>"]
    for template in (CHATML, MARKED):
        (row,) = rows_of(make_tokenizer(template), Conversation(TWO_TURNS.messages, context=3))
        assert learned_texts(tokenizer, row) == ["Five it is.<|im_end|>"]
    assert rows_of(tokenizer, Conversation((hello,))) == []


def test_an_answer_to_a_system_message_alone_is_learned(make_tokenizer):
    tokenizer = make_tokenizer(CHATML)
    (row,) = rows_of(
        tokenizer, Conversation(({"role": "system", "content": "You are brief."}, TWO_TURNS.messages[1]))
    )
    assert learned_texts(tokenizer, row) == ["It is four.<|im_end|>"]


def test_plain_text_is_learned_whole_with_the_end_token_behind_it(make_tokenizer):
    tokenizer = make_tokenizer()
    row, other = (rows[0] for rows in encode(make_chat(tokenizer, "assistant"), [
        Conversation((), text="It is four."), Conversation((), text="Five it is.<|endoftext|>")]))  # fmt: skip
    assert tokenizer.decode(row.input_ids) == "It is four.<|endoftext|>"
    assert (row.labels[1:] == row.input_ids[1:]).all()
    assert row.labels[0] == IGNORED
    assert tokenizer.decode(other.input_ids) == "Five it is.<|endoftext|>"


def test_rows_of_text_and_of_messages_keep_their_order(make_tokenizer):
    tokenizer = make_tokenizer(CHATML)
    rows = encode(
        make_chat(tokenizer, "assistant"),
        [Conversation((), text="Hello there"), TWO_TURNS, Conversation((), text="four")],
    )
    assert [tokenizer.decode(row[0].input_ids)[:10] for row in rows] == [
        "Hello ther",
        "<|im_start",
        "four<|endo",
    ]


@pytest.mark.parametrize("shipped", ["plain", "chatml"])
def test_the_shipped_templates_show_tools_calls_and_thoughts(make_tokenizer, shipped):
    tokenizer = make_tokenizer()
    assert use_template(tokenizer, shipped) == f"the shipped {shipped}.jinja"
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    messages = (
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": "What is two plus two?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "Four.", "reasoning_content": "Easy."},
    )
    row = Conversation(messages, tools=[{"name": "adder"}])
    ((part,),) = render_rows(make_chat(tokenizer, "assistant"), [row])
    end = "<|im_end|>" if shipped == "chatml" else "<|endoftext|>"
    assert [part.text[a:b] for a, b in part.supervised] == [
        '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>' + end,
        f"<think>\nEasy.\n</think>\n\nFour.{end}",
    ]
    assert part.text.count("You are brief.") == part.text.count("adder") == 1


def test_a_tokenizer_without_offsets_is_refused():
    class Slow:
        is_fast = False

    with pytest.raises(ConfigError, match="tokenizer.json"):
        make_chat(Slow(), "assistant")


def test_the_last_answer_is_asked_for_and_is_what_the_template_writes_after_its_prompt(make_tokenizer):
    chat = make_chat(make_tokenizer(CHATML), "assistant")
    assert asked_turns(chat, TWO_TURNS) == [3]
    assert answer_text(chat, TWO_TURNS, 3) == "Five it is."


def test_marks_decide_also_where_the_prompt_ends_otherwise_than_the_history(make_tokenizer):
    tokenizer = make_tokenizer(
        MARKED.replace(
            "'<|im_start|>assistant\\n' }}{% endif %}", "'<|im_start|>assistant\\n<think>' }}{% endif %}"
        )
    )
    assert "<think>" in tokenizer.chat_template
    for supervise, learned in (
        ("assistant", ["It is four.<|im_end|>", "Five it is.<|im_end|>"]),
        ("last", ["Five it is.<|im_end|>"]),
    ):
        (row,) = rows_of(tokenizer, TWO_TURNS, supervise)
        assert learned_texts(tokenizer, row) == learned


TRL_TEMPLATES = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"


@pytest.mark.parametrize(
    "family", ["llama3", "qwen2_5", "qwen3_instruct_2507", "gemma", "gemma3", "cohere", "phi3", "lfm2"]
)
def test_real_templates_give_the_answers_that_their_marked_twins_in_trl_give(make_tokenizer, family):
    """The other way round from ours: TRL put {% generation %} into copies of these templates by hand."""
    found = []
    for suffix in ("", "_training"):
        tokenizer = make_tokenizer((TRL_TEMPLATES / f"{family}{suffix}.jinja").read_text(), bos_token="<bos>")
        ((part,),) = render_rows(make_chat(tokenizer, "assistant"), [TWO_TURNS])
        learned = "".join(part.text[a:b] for a, b in part.supervised)
        found.append(
            (part.text, learned.replace("\n", ""))
        )  # where they differ it is in line breaks of the template
    assert found[0] == found[1]


def test_the_marker_of_the_next_turn_is_learned_where_nothing_else_ends_an_answer(make_tokenizer):
    tokenizer = make_tokenizer((TRL_TEMPLATES / "glm4moe.jinja").read_text())
    tokenizer.add_tokens(["<|observation|>", "<tool_call>", "</tool_call>"])  # as GLM's has them
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turns = [
        *TWO_TURNS.messages[:3],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "Five it is."},
    ]
    (row,) = rows_of(tokenizer, Conversation(tuple(turns), source="f:1"))
    first, calls, last = learned_texts(tokenizer, row)
    assert first == "\n<think></think>\nIt is four.<|user|>"
    assert calls.startswith("\n<think></think>\n<tool_call>add") and calls.endswith(
        "</tool_call><|observation|>"
    )
    assert last == "\n<think></think>\nFive it is.<|endoftext|>"
    (row,) = rows_of(tokenizer, Conversation(tuple(turns[:4]), source="f:1"))
    assert learned_texts(tokenizer, row)[1].endswith("</tool_call><|endoftext|>")


@pytest.mark.parametrize("between", ["", "\n", " \n"])
def test_white_space_before_such_a_marker_is_learned_with_it(make_tokenizer, between):
    marked = MARKED_WITHOUT_END.replace("{{ '<|im_end|>\\n' }}", "").replace(
        "<|im_start|>", "BETWEEN<|im_start|>"
    )
    plain = GLM.replace("'<|", "'BETWEEN<|")
    for template, marker in ((plain, "<|user|>"), (marked, "<|im_start|>")):
        tokenizer = make_tokenizer(template.replace("BETWEEN", between.replace("\n", "\\n")))
        (row,) = rows_of(tokenizer, TWO_TURNS)
        assert learned_texts(tokenizer, row)[0] == f"It is four.{between}{marker}"


def test_conversations_whose_answers_no_token_ends_are_counted(make_tokenizer):
    for template, count in ((HEADINGS, 1), (GLM, 0), (CHATML, 0)):
        notes = Counter()
        encode(make_chat(make_tokenizer(template), "assistant"), [TWO_TURNS, talk("What?", "Four.")], notes)
        assert notes[UNSTOPPED] == count
