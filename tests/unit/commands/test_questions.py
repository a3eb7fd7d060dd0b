"""What held-out rows ask, and what of an answer is compared with what."""

import json

import pytest

from sft_play.builtin.models import byte_level_tokenizer
from sft_play.commands.questions import questions
from sft_play.config.schema import RunConfig
from sft_play.data.prepare import prepare
from tests.unit.finished_run import write_rows

GIVEN = {"b": 1, "a": [2]}
CALL = {"type": "function", "function": {"name": "find", "arguments": GIVEN}}
LAST = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIt is found."}
TURNS = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "found"},
    LAST,
]
OTHER_CALLS = (  # a format of calls that nothing reads
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
    "!{{ call.function.name }} {% for k, v in call.function.arguments | dictsort %}{{ k }}={{ v }};{% endfor %}"
    "{% endfor %}{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def asked(tmp_path, monkeypatch):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))

    def ask(rows, limit=None, **data):
        file = str(write_rows(tmp_path / "rows.jsonl", rows))
        data = {"train_path": file, "val_path": file, "num_workers": 1, "chat_template": "plain", **data}
        config = RunConfig.model_validate({"model": {"name": "m"}, "data": data})
        tokenizer = byte_level_tokenizer([json.dumps(rows)], 400, 512)
        prepared = prepare(config, tokenizer, model_limit=512, progress=False)
        return questions(config, prepared, "val", tokenizer, limit), tokenizer

    return ask


def test_each_call_of_a_row_and_its_last_answer_are_asked_for_with_what_was_said_before(asked):
    (call, last), tokenizer = asked([{"messages": TURNS}])
    assert (call.reference, call.messages) == ('find({"a": [2], "b": 1})', (TURNS[0],))
    assert (last.reference, last.calls) == ("It is found.", ())
    assert last.shown == 'user: q\nassistant: find({"a": [2], "b": 1})\ntool: found'
    assert "found" in tokenizer.decode(last.ids) and "It is" not in tokenizer.decode(last.ids)
    right = call.compared('Well. <tool_call>{"arguments": {"b": 1, "a": [2]}, "name": "find"}</tool_call>')
    assert right.answer == right.reference and right.calls
    assert last.compared("<think>no</think>It is found.").answer == last.reference


def test_the_limit_counts_answers_and_calls_that_are_not_learned_are_not_asked_for(asked):
    rows = [{"messages": TURNS}] * 2
    assert [question.reference[:4] for question in asked(rows, 3)[0]] == ["find", "It i", "find"]
    assert [one.reference for one in asked(rows, learn_tool_calls=False)[0]] == ["It is found."] * 2
    assert [one.reference for one in asked(rows, supervise="last")[0]] == ["It is found."] * 2


def test_calls_of_a_template_that_writes_them_otherwise_are_compared_as_texts(asked, tmp_path):
    template = tmp_path / "other.jinja"
    template.write_text(OTHER_CALLS)
    (call, _), _ = asked([{"messages": TURNS}], chat_template=str(template))
    assert (call.reference, call.calls) == ("!find a=[2];b=1;", ())
