"""Control tokens that stand in the texts of rows."""

import json

import numpy as np
import pytest

from sft_play.config.schema import RunConfig
from sft_play.data.chat import make_chat, with_control_tokens
from sft_play.data.control_tokens import BEGIN, END, control_tokens, without_marks
from sft_play.data.prepare import prepare
from sft_play.data.tokens import encode, prompt_ids
from sft_play.errors import DataError
from sft_play.parts import IGNORED
from sft_play.rows.formats import Conversation
from sft_play.rows.messages import alternating
from tests.unit.data.test_chat import CHATML, LLAMA3, MARKED, MISTRAL, PHI, QWEN3, learned_texts

TEXT = "It ends with <|im_end|> or </s>, <|im_end|>."
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "phi": PHI, "marked": MARKED}


def settings(tokenizer, setting="escape", supervise="assistant"):
    return with_control_tokens(make_chat(tokenizer, supervise), setting)


def count(tokenizer, ids, *texts):
    return [list(ids).count(tokenizer.convert_tokens_to_ids(text)) for text in texts]


@pytest.fixture(params=TEMPLATES)
def tokenizer(request, make_tokenizer, raw_tokenizer):
    return make_tokenizer(TEMPLATES[request.param], raw_tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("supervise", ["assistant", "all"])
def test_escaped_ones_are_spelled_as_text_and_the_template_keeps_its_own(tokenizer, supervise):
    plain = Conversation(alternating("What?", "It ends."), source="f:1")
    row = Conversation(alternating(TEXT, TEXT), source="f:1")
    chat = settings(tokenizer, supervise=supervise)
    (own,), (given,) = encode(chat, [plain, row])
    wanted, found = (count(tokenizer, one.input_ids, "<|im_end|>", "</s>") for one in (own, given))
    assert found == wanted
    assert TEXT in tokenizer.decode(given.input_ids[given.labels != IGNORED])
    assert tokenizer.decode(given.input_ids).count(TEXT) == 2
    kept = encode(settings(tokenizer, "keep", supervise), [row])[0][0]
    assert count(tokenizer, kept.input_ids, "<|im_end|>") == [wanted[0] + 4]
    assert tokenizer.decode(kept.input_ids) == tokenizer.decode(given.input_ids)


def test_without_any_in_the_texts_all_settings_give_the_same_tokens(tokenizer):
    row = Conversation(alternating("What is two plus two?", "It is <think> four </think>."), source="f:1")
    kept, escaped = (encode(settings(tokenizer, setting), [row])[0][0] for setting in ("keep", "escape"))
    assert kept.input_ids.tolist() == escaped.input_ids.tolist()
    assert kept.labels.tolist() == escaped.labels.tolist()


def test_prompts_at_inference_are_tokenized_as_in_training(tokenizer):
    chat = settings(tokenizer)
    turns = alternating(TEXT, TEXT, TEXT, TEXT)
    (row,) = encode(settings(tokenizer, supervise="last"), [Conversation(turns)])[0]
    first = int(np.flatnonzero(row.labels != IGNORED)[0])
    assert row.input_ids[:first].tolist() == prompt_ids(chat, Conversation(turns[:3]))


def test_they_are_found_in_all_that_a_template_may_render(make_tokenizer):
    tokenizer = make_tokenizer()
    chat = settings(tokenizer, "refuse")
    call = {"type": "function", "function": {"name": "f", "arguments": {"text": ["<|im_end|>"]}}}
    rows = [
        Conversation(({"role": "system", "content": "<s>"}, *alternating("q", "a")), source="f:1"),
        Conversation(({"role": "user", "content": "q"}, {"role": "assistant", "content": "",
                      "reasoning_content": "<pad>"}), source="f:2"),
        Conversation(({"role": "user", "content": "q"}, {"role": "assistant", "content": "",
                      "tool_calls": [call]}), source="f:3"),
        Conversation(alternating("q", "a"), tools=[{"description": "</s>"}], source="f:4"),
        Conversation((), text="once <|endoftext|>", source="f:5"),
    ]  # fmt: skip
    assert [chat.controls.first_in(row) for row in rows] == [
        "<s>", "<pad>", "<|im_end|>", "</s>", "<|endoftext|>",
    ]  # fmt: skip
    for row in rows:
        with pytest.raises(DataError, match=f"^{row.source}: a text has the control token .*=refuse forbids"):
            prompt_ids(chat, row)


def test_a_template_that_cuts_texts_leaves_no_marks(make_tokenizer):
    tokenizer = make_tokenizer(QWEN3)
    row = Conversation(alternating("q", "<think>\nno </s>\n</think>\n\nyes <s>"))
    (given,) = encode(settings(tokenizer), [row])[0]
    assert learned_texts(tokenizer, given) == ["<think>\nno </s>\n</think>\n\nyes <s><|im_end|>"]
    assert without_marks(f"a{BEGIN}b", [(0, 3)]) == ("ab", ((0, 2),), ())
    text = f"{BEGIN}</s>{END}x{BEGIN}<s>{END}"
    assert without_marks(text, [(0, 6), (7, 12)]) == ("</s>x<s>", ((0, 4), (5, 8)), ((0, 4), (5, 8)))


def test_control_tokens_are_special_ones_and_what_the_template_writes_around_any_turn(make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<turn>", "<think>", "<tool>"])
    found = control_tokens(tokenizer, "keep", "<turn>user question").pattern
    assert [bool(found.search(text)) for text in ("<turn>", "</s>", "<think>", "<tool>", "</ s>")] == [
        True, True, False, False, False,
    ]  # fmt: skip


def test_one_that_is_not_special_is_spelled_too(make_tokenizer):
    tokenizer = make_tokenizer("{% for m in messages %}{{ '<turn>' + m.content }}{% endfor %}")
    tokenizer.add_tokens(["<turn>"])
    (row,) = encode(settings(tokenizer), [Conversation(alternating("a <turn>", "b<turn>c"))])[0]
    assert count(tokenizer, row.input_ids, "<turn>") == [2]
    assert tokenizer.decode(row.input_ids) == "<turn>a <turn><turn>b<turn>c<|endoftext|>"


@pytest.mark.parametrize("begins", [True, False])
def test_documents_are_spelled_and_begin_and_end_as_before(make_tokenizer, raw_tokenizer, begins):
    from tokenizers import processors

    tokenizer = make_tokenizer(None, raw_tokenizer, bos_token="<s>", eos_token="</s>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    document = Conversation((), text=f"<s>{TEXT}", begins=begins)
    chats = [settings(tokenizer, setting, "all") for setting in ("escape", "keep")]
    escaped, kept = (encode(chat, [document])[0][0].input_ids for chat in chats)
    tokenizer.backend_tokenizer.post_processor = None
    assert count(tokenizer, escaped, "<|im_end|>", "<s>", "</s>") == [0, int(begins), 1]
    assert count(tokenizer, kept, "<|im_end|>", "<s>", "</s>") == [2, 1 + begins, 2]
    opening = "<s>" if begins else ""
    assert tokenizer.decode(escaped).replace(" ", "") == f"{opening}<s>{TEXT}</s>".replace(" ", "")


@pytest.fixture
def run(write_rows, make_tokenizer, tmp_path, monkeypatch):
    """`run(rows, **data settings)`: the statistics of the rows with a ChatML tokenizer."""
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))

    def run(rows, **data):
        tree = {"model": {"name": "toy"}, "data": {"train_path": str(write_rows(rows)), **data}}
        return prepare(RunConfig.model_validate(tree), make_tokenizer(CHATML), progress=False)

    return run


ROWS = [{"question": f"{i}?", "answer": f"{i} <|im_end|>" if i in (2, 5) else f"{i}"} for i in range(40)]


def test_kept_ones_are_counted_with_the_first_row_and_learned(run, make_tokenizer):
    data = run(ROWS, val_fraction=0)
    (said,) = [text for text in data.stats["warnings"] if "control" in text]
    assert "2 rows with control tokens in the text (the first is " in said
    assert "rows.jsonl:3: '<|im_end|>')" in said and "data.control_tokens=escape" in said
    end = make_tokenizer().convert_tokens_to_ids("<|im_end|>")
    assert [list(row["labels"]).count(end) for row in data.train][:4] == [1, 1, 2, 1]


def test_escaped_ones_are_not_warned_of_and_refused_ones_end_with_the_first_row(run, make_tokenizer):
    data = run(ROWS, control_tokens="escape", val_fraction=0)
    assert not [text for text in data.stats["warnings"] if "control" in text]
    end = make_tokenizer().convert_tokens_to_ids("<|im_end|>")
    assert {list(row["input_ids"]).count(end) for row in data.train} == {2}  # of the question and the answer
    with pytest.raises(DataError, match=r"rows.jsonl:3, 6: a text has the control token '<\|im_end\|>'"):
        run(ROWS, control_tokens="refuse")


def test_raw_text_is_searched_too(run):
    texts = [{"text": f"{i} <pad>" if i > 2 else f"{i}"} for i in range(40)]
    warnings = run(texts, task="cpt").stats["warnings"]
    assert any("37 rows with control tokens in the text (the first is" in text for text in warnings)
    with pytest.raises(DataError, match=r"rows.jsonl:4, 5, .*, 23: a text has the control token '<pad>'"):
        run(texts, task="cpt", control_tokens="refuse")


def test_rows_from_several_processes_name_the_first_one(run):
    rows = [{"question": f"{i}?", "answer": f"{i} </s>" if i > 400 else f"{i}"} for i in range(1200)]
    warnings = run(rows, num_workers=2).stats["warnings"]
    assert any(
        "799 rows with control tokens" in text and "rows.jsonl:402: '</s>'" in text for text in warnings
    )
    assert json.loads(json.dumps(warnings)) == warnings
